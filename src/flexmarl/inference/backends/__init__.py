"""The backends that implement `inference/interface.py`."""
