"""Decides in which steps a policy is trained, and in which it rests: policies that are trained in turns.

    phases: [{steps: 10, train: true}, {steps: 5, train: false}]

    step    0 ........ 9   10 ... 14   15 ....... 24   25 ... 29
            train          rest        train           rest          and so on

A policy that rests is served at the version that it has. For the credit of others it is as a frozen policy.
"""

from collections.abc import Sequence

from pydantic import Field

from flexmarl.settings import Settings


class PhaseSettings(Settings):
    """Some steps in a row in which a policy is trained, or rests."""

    steps: int = Field(ge=1, description="Number of steps.")
    train: bool = Field(default=True, description="false: the policy rests, and keeps its version.")


def resting(phases: Sequence[PhaseSettings], step: int) -> str:
    """The reason why a policy rests in a step, counted from 0; "" if it is trained. The phases come again and again.

    >>> phases = [PhaseSettings(steps=2), PhaseSettings(steps=1, train=False)]
    >>> [bool(resting(phases, step)) for step in range(6)]
    [False, False, True, False, False, True]
    >>> resting(phases, 5)
    'the policy rests from step 6 to 6 (training.phases)'
    """
    begin = step - step % sum(phase.steps for phase in phases) if phases else 0
    for phase in phases:
        end = begin + phase.steps
        if step < end:
            return "" if phase.train else f"the policy rests from step {begin + 1} to {end} (training.phases)"
        begin = end
    return ""
