"""The backends that implement `experience/interface.py`."""
