"""Games of two seats that one policy plays against itself: Nim, and Kuhn's poker."""
