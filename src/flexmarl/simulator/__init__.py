"""Plays the production loops in virtual time on modelled devices. In: coroutines, costs. Out: what happens and when."""
