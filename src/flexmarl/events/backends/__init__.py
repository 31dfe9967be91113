"""Sinks that need more than the standard library. In: values by step. Out: another program's format."""
