"""Boxes of this machine. In: limits and files. Out: processes that reach nothing else, and are gone afterwards."""
