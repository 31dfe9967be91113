"""Decides the seed of every call, from what the call is, never from when it is sent.

Parallel calls finish in any order and a resumed run plays its groups again: both must sample the same tokens.
"""

import hashlib

from flexmarl.records import IntArray


def context_hash(policy: str, prompt_ids: IntArray) -> str:
    """16 hex digits for the policy and the exact prompt ids: equal where, and only where, the context is."""
    digest = hashlib.blake2b(policy.encode() + b"\0", digest_size=8)
    digest.update(prompt_ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def call_seed(run_seed: int, trajectory_id: str, agent: str, context: str, nth: int) -> int:
    """63-bit seed of the nth call of this agent with this context in the episode.

    The trajectory id (`g12e3a0`) says group, episode and attempt.
    """
    return _hash(run_seed, trajectory_id, agent, context, nth)


def episode_seed(run_seed: int, trajectory_id: str) -> int:
    """63-bit seed of the workflow's own random numbers."""
    return _hash(run_seed, trajectory_id)


def task_seed(input_id: str) -> int:
    """63-bit seed of what all episodes of a task have in common, such as where its environment starts."""
    return _hash("task", input_id)


def _hash(*parts: int | str) -> int:
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
