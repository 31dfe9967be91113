"""Fakes and conformance checks for every interface. In: your backend. Out: the first law it breaks."""
