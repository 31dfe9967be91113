"""The backends that implement `objects/interface.py`."""
