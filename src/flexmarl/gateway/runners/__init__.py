"""Runs programs at doors. In: a task and addresses of seats. Out: an answer."""
