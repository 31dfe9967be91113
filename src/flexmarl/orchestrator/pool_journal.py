"""Runs the journal's part in the pool: every call, every load and every loss of an instance becomes an event.

consumes    what the pool reports, as it happens
waits for   nothing
produces    `call`, `loaded`, `instance_lost`, `instance_replaced`, `moved`; those that took time in their process's row
unblocked by nothing
"""

from flexmarl.events.journal import Journal
from flexmarl.inference.observed import CallRecord, LoadRecord, MoveRecord
from flexmarl.inference.pool import InferencePool
from flexmarl.records import Version


def journal_pool(pool: InferencePool, journal: Journal) -> None:
    """From now on the pool reports to the journal. Called inside the event loop."""
    own = PoolJournal(journal)
    pool.on_call, pool.on_loaded, pool.on_lost = own.called, own.loaded, own.lost
    pool.on_replaced, pool.on_moved = own.replaced, own.moved


class PoolJournal:
    """Writes down what the pool reports."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def called(self, call: CallRecord) -> None:
        """An instance has answered."""
        seldom = {"kept_tokens": call.kept_tokens, "waited_s": round(call.waited_s, 6)}
        self._journal.event(
            "call",
            process=process_of(call.instance),
            began=self._journal.moment(call.sent_at),
            policy=call.policy,
            request=call.request_id,
            version=call.version,
            prompt_tokens=call.prompt_tokens,
            reused_tokens=call.reused_tokens,
            sampled_tokens=call.sampled_tokens,
            finish=call.finish,
            **{name: figure for name, figure in seldom.items() if figure},
        )

    def loaded(self, load: LoadRecord) -> None:
        """An instance serves new weights."""
        self._journal.event(
            "loaded",
            process=process_of(load.instance),
            began=self._journal.moment(load.began_at),
            policy=load.policy,
            version=load.version,
            checksum=load.checksum,
        )

    def lost(self, instance: str, because: str) -> None:
        """An instance is gone."""
        self._journal.event("instance_lost", instance=instance, because=because)

    def replaced(self, old: str, new: str, version: Version, seconds: float) -> None:
        """A new instance came for a lost one."""
        self._journal.event(
            "instance_replaced",
            because=f"{old} was lost",
            process=process_of(new),
            began=round(self._journal.now() - seconds, 6),
            instance=new,
            replaces=old,
            version=version,
        )

    def moved(self, move: MoveRecord) -> None:
        """An instance serves another policy from now on."""
        self._journal.event(
            "moved",
            because=move.because,
            process=process_of(move.became),
            began=self._journal.moment(move.began_at),
            instance=move.instance,
            to=move.to,
            became=move.became,
        )


def process_of(instance: str) -> str:
    """The process that an instance has to itself, where the world gives it one: `engine/solver/0`."""
    return f"engine/{instance}"
