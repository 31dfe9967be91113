"""Runs the journal's part in the pool: every call, every load and every loss of an instance becomes an event.

consumes    what the pool reports, as it happens
waits for   nothing
produces    `call`, `loaded`, `instance_lost`, `instance_replaced`, `moved`; those that took time in their process's row
unblocked by nothing
"""

from flexmarl.inference.observed import CallRecord, LoadRecord, MoveRecord
from flexmarl.inference.pool import InferencePool
from flexmarl.observability.journal import Journal
from flexmarl.records import Version


def journal_pool(pool: InferencePool, journal: Journal) -> None:
    """From now on the pool reports to the journal. Called inside the event loop."""

    def called(call: CallRecord) -> None:
        seldom = {"kept_tokens": call.kept_tokens, "waited_s": round(call.waited_s, 6)}
        journal.event(
            "call",
            process=process_of(call.instance),
            began=journal.moment(call.sent_at),
            policy=call.policy,
            request=call.request_id,
            version=call.version,
            prompt_tokens=call.prompt_tokens,
            reused_tokens=call.reused_tokens,
            sampled_tokens=call.sampled_tokens,
            finish=call.finish,
            **{name: figure for name, figure in seldom.items() if figure},
        )

    def loaded(load: LoadRecord) -> None:
        journal.event(
            "loaded",
            process=process_of(load.instance),
            began=journal.moment(load.began_at),
            policy=load.policy,
            version=load.version,
            checksum=load.checksum,
        )

    def lost(instance: str, because: str) -> None:
        journal.event("instance_lost", instance=instance, because=because)

    def replaced(old: str, new: str, version: Version, seconds: float) -> None:
        journal.event(
            "instance_replaced",
            because=f"{old} was lost",
            process=process_of(new),
            began=round(journal.now() - seconds, 6),
            instance=new,
            replaces=old,
            version=version,
        )

    def moved(move: MoveRecord) -> None:
        journal.event(
            "moved",
            because=move.because,
            process=process_of(move.became),
            began=journal.moment(move.began_at),
            instance=move.instance,
            to=move.to,
            became=move.became,
        )

    pool.on_call, pool.on_loaded, pool.on_lost, pool.on_replaced = called, loaded, lost, replaced
    pool.on_moved = moved


def process_of(instance: str) -> str:
    """The process that an instance has to itself, where the world gives it one: `engine/solver/0`."""
    return f"engine/{instance}"
