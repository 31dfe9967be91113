"""What a journal amounts to. In: the events of a run, real or simulated. Out: tables, curves, timelines, fits."""
