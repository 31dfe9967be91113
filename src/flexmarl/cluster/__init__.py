"""Who holds which devices. In: what a run asks for. Out: the device a worker may use, and the thread that uses it."""
