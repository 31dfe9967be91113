"""Processes that hold one object each. In: specs of residents. Out: live residents, and an event when one is lost."""
