"""Decides whether what was sampled fits the versions a step is played at (laws 3 and 10)."""

from collections.abc import Iterable, Mapping

from flexmarl.errors import TrainingError
from flexmarl.records import PolicyName, Turn, Version


class Versions:
    """The one place that knows which version of each policy is served."""

    def __init__(self, served: Mapping[PolicyName, Version]) -> None:
        self._served = dict(served)

    @property
    def served(self) -> Mapping[PolicyName, Version]:
        """The version every live instance of a policy acknowledged."""
        return dict(self._served)

    def acknowledged(self, policy: PolicyName, version: Version) -> None:
        """All live instances of the policy serve `version` now."""
        if version < self._served[policy]:
            raise TrainingError(f"policy '{policy}' serves version {self._served[policy]}; {version} would go back")
        self._served[policy] = version

    def check_strict(self, turns: Iterable[Turn]) -> None:
        """Synchronous modes: every token was sampled at the served version (law 3). Raises TrainingError."""
        for turn in turns:
            expected = self._served[turn.policy]
            wrong = [run for run in turn.versions if run.version != expected]
            if wrong:
                raise TrainingError(
                    f"turn {turn.sample_id}: token {wrong[0].start} was sampled by version {wrong[0].version} of "
                    f"'{turn.policy}', but this step is played at version {expected}"
                )
