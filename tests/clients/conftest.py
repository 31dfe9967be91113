"""The sandbox, for clients that are commands: skipped by name where boxes cannot be closed."""

from tests.sandbox.conftest import place, sandbox

__all__ = ["place", "sandbox"]
