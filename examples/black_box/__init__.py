"""The math team as a program that flexmarl does not own: it speaks OpenAI's API through OpenAI's own client."""
