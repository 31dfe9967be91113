"""The relay: a speaker who sees a thing, a listener who must name it, and words that mean nothing yet."""
