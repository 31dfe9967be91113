"""Computes prefixes that several rows share only once. In: the rows of a forward pass. Out: one tree of tokens, and
attention on it.

The proof that nothing else changes is in docs/tree.md.
"""
