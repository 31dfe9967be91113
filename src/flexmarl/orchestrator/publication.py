"""Decides after which updates a policy's weights are published, in the asynchronous modes (`pipeline.publish`).

    eager      after each update
    lazy       after every N updates
    adaptive   when few calls wait for the policy's instances; after N updates at the latest

A publication occupies the trainer, and stops every instance of the policy while it loads. While calls wait, all slots
of the instances are busy, and a load delays the run by its whole duration. When none waits, some slots are idle: a load
costs less, and the calls that fill these slots next get the newer weights.

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
    settings: PublicationSettings, *, unpublished: int, waiting: float, rests: bool
) -> PublicationRuling:
    """Decides whether a policy's newest weights are published now.

    `unpublished`: updates since the last publication, at least 1. `waiting`: calls that no slot serves, per instance of
    the policy. `rests`: True if the run rests after this step: a checkpoint or an evaluation needs the newest weights.

    >>> adaptive = PublicationSettings(type="adaptive", every=4, waiting=1.0)
    >>> publication(adaptive, unpublished=2, waiting=7.5, rests=False).because
    '7.5 calls wait per instance, more than 1; update 2 of 4'
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
    deep = waiting > settings.waiting
    than = "more than" if deep else "at most"
    because = f"{waiting:g} calls wait per instance, {than} {settings.waiting:g}; {count}"
    return PublicationRuling(not deep, because)
