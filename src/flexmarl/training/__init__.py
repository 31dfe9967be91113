"""Trains policies. In: micro-batches of samples with advantages. Out: new weights under a new version."""
