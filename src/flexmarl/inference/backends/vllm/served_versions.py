"""Decides which versions of its policies an engine serves: a request begins under the newest, the last ones stay.

           loaded            S + 1 newer ones are loaded
    version ──────► newest ──► kept ──────────────────────► gone
                    begins     ends what
                    requests   it began

S is the lag of the mode (docs/math.md, section 9). Versions of an adapter stay side by side, whole weights replace each
other, and so does a version that is loaded again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flexmarl.records import PolicyName, Version


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One version of a policy, as it is loaded."""

    policy: PolicyName
    version: Version
    adapter: int = 0
    """vLLM's number of the adapter, used once; 0 means the weights of the model itself."""
    folder: Path = Path()
    """The folder that the adapter was loaded from. It is gone."""

    @property
    def salt(self) -> str:
        """Keeps its prefixes apart from those of other versions and policies."""
        return f"{self.policy}@{self.version}"


class ServedVersions:
    """The loaded versions of each policy of one engine."""

    def __init__(self, policies: Iterable[PolicyName], version: Version, *, kept: int) -> None:
        """`kept` is the number of versions that requests may run under, the newest included; 1 for whole weights."""
        self._of = {policy: [Served(policy, version)] for policy in policies}
        self._kept = kept

    @property
    def policies(self) -> tuple[PolicyName, ...]:
        """The policies that the engine serves."""
        return tuple(self._of)

    def newest(self, policy: PolicyName) -> Served:
        """The version under which the policy's requests begin."""
        return self._of[policy][-1]

    def serve(self, new: Served) -> list[Served]:
        """Makes a loaded version the newest of its policy; returns those that go, oldest first.

        >>> versions, adapters = ServedVersions(["solver"], 0, kept=2), [Served("solver", n, n) for n in (1, 2, 3)]
        >>> [[old.version for old in versions.serve(new)] for new in adapters]
        [[], [0], [1]]
        """
        served = self._of[new.policy]
        replaced = [old for old in served if old.version == new.version]
        stay = [old for old in served if old not in replaced]
        late = stay[: max(0, len(stay) + 1 - self._kept)]
        self._of[new.policy] = [*stay[len(late) :], new]
        return [*replaced, *late]
