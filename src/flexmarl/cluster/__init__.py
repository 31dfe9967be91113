"""Processes that hold one object each. In: what a run asks for. Out: live workers, and an event when one dies."""
