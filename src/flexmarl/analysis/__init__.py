"""Evaluation of a journal. In: the events of a run, real or simulated. Out: tables, curves, timelines, fits."""
