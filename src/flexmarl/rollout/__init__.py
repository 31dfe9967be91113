"""Plays workflows. In: groups that the admission rule let through. Out: finished groups, failed episodes included."""
