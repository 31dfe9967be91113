"""Sinks that need more than the standard library. In: values by step. Out: files of another program."""
