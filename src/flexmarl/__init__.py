"""Trains teams of LLM agents with reinforcement learning, from a laptop CPU to a cluster with one config."""

__version__ = "0.1.0"
