"""Backends of `training/interface.py`: the trainers. In: rows of micro-batches. Out: weights of a new version."""
