"""The code team: a coder that writes an expression for three examples, and a tester that picks the one to try it on."""
