"""Decides after which updates a policy's weights are published, in the asynchronous modes (`pipeline.publish`).

    eager      after each update
    lazy       after every N updates
    adaptive   when nothing waits that a publication would delay; after N updates at the latest

A publication stops every instance of the policy while it loads, and occupies the trainer. While calls wait, all slots
of the instances are busy, and a load delays the run by its duration. While a step's worth of finished groups waits, the
trainer is behind, and a publication delays the next update by its duration. Where neither queue is deep, publishing
costs nothing, and the next calls get newer weights.

At most N - 1 updates are ahead of what is served, so a token is at most N - 1 versions older when it is trained on
than with `eager` (docs/math.md, section 9).
"""

from dataclasses import dataclass

from flexmarl.orchestrator.settings import PublicationSettings


@dataclass(frozen=True, slots=True)
class PublicationRuling:
    """The decision whether weights are published, and why."""

    publishes: bool
    because: str


def publication(
    settings: PublicationSettings, *, unpublished: int, calls: float, steps: float, rests: bool
) -> PublicationRuling:
    """Decides whether a policy's newest weights are published now.

    `unpublished`: updates since the last publication, at least 1. `calls`: those that no slot serves, per instance of
    the policy. `steps`: finished groups that wait to be trained, in batches of a step. `rests`: True if the run rests
    after this step: a checkpoint or an evaluation needs the newest weights.

    >>> adaptive = PublicationSettings(type="adaptive", every=4)
    >>> publication(adaptive, unpublished=2, calls=7.5, steps=0.0, rests=False).because
    'update 2 of 4; 7.5 calls wait per instance, more than 1'
    """
    if rests:
        return PublicationRuling(True, "the run rests after this step")
    if settings.type == "eager":
        return PublicationRuling(True, "each update is published")
    count = f"update {unpublished} of {settings.every}"
    if unpublished >= settings.every:
        return PublicationRuling(True, count)
    if settings.type == "lazy":
        return PublicationRuling(False, count)
    if calls > settings.waiting_calls:
        because = f"{calls:.3g} calls wait per instance, more than {settings.waiting_calls:g}"
        return PublicationRuling(False, f"{count}; {because}")
    if steps >= settings.waiting_steps:
        because = f"finished groups of {steps:.3g} steps wait to be trained, at least {settings.waiting_steps:g}"
        return PublicationRuling(False, f"{count}; {because}")
    return PublicationRuling(True, f"{count}; {calls:.3g} calls per instance and groups of {steps:.3g} steps wait")
