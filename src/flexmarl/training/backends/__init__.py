"""The backends that implement `training/interface.py`."""
