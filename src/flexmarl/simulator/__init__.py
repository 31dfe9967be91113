"""The same loops and rules in virtual time. In: coroutines. Out: what they would do, without waiting for it."""
