"""Runs resets of reference policies (`training.kl.reset`): at a step boundary, the policy becomes its own reference.

  step k ──► reset, if its count is due ──► save ──► evaluate ──► reset, if evaluations say so ──► step k + 1

consumes    the evaluations of the run; the steps of the last resets
waits for   the trainers whose reference is reset, one after the other
produces    a reference and an empty optimiser; the event, with its reason
unblocked by the trainers

The step of each last reset is part of a checkpoint, so a resumed run resets when an undisturbed one would.
"""

from collections.abc import Mapping

from flexmarl.events.event import Events
from flexmarl.events.training_events import ReferenceReset
from flexmarl.orchestrator.settings import FigureSettings
from flexmarl.orchestrator.stopping import History, reset_after
from flexmarl.records import PolicyName, Version
from flexmarl.training.interface import Trainer
from flexmarl.training.kl import ResetSettings


class References:
    """The policies whose reference follows them, and the steps of their last resets."""

    def __init__(
        self,
        trainers: Mapping[PolicyName, Trainer],
        settings: Mapping[PolicyName, ResetSettings],
        *,
        events: Events,
        steps: Mapping[PolicyName, int] = {},
    ) -> None:
        """`settings` has the policies whose reference is reset. `steps` of the last resets are a checkpoint's."""
        self._trainers, self._settings, self._events = trainers, settings, events
        self._steps = dict(steps)

    @property
    def steps(self) -> Mapping[PolicyName, int]:
        """The completed steps at the last reset of each policy that had one."""
        return dict(self._steps)

    @property
    def compared(self) -> Mapping[str, FigureSettings]:
        """The figures of evaluations that may reset a reference, by the key of the setting."""
        return {
            f"policies.{policy}.training.kl.reset": FigureSettings(metric=settings.metric)
            for policy, settings in self._settings.items()
            if settings.patience is not None
        }

    def due(self, step: int) -> bool:
        """True if a reference will be reset after `step` completed steps, whatever the evaluations say."""
        return any(reset_after({}, step, self._since(policy), of) for policy, of in self._settings.items())

    async def reset(self, step: int, history: History, served: Mapping[PolicyName, Version]) -> None:
        """Resets those that are due after `step` completed steps. Trainers must be at rest. Raises TrainingError."""
        for policy, settings in self._settings.items():
            if because := reset_after(history, step, self._since(policy), settings):
                await self._trainers[policy].reset_reference()
                self._steps[policy] = step
                self._events.emit(ReferenceReset(policy=policy, step=step, version=served[policy], because=because))

    def _since(self, policy: PolicyName) -> int:
        return self._steps.get(policy, 0)
