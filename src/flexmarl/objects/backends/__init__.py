"""Places where objects can be held."""
