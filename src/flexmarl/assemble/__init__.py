"""Wires a run: the only place that names backends. In: settings. Out: a run that trains, evaluates or exports.

settings ──► blueprint.py   folder, code, tasks, renderers, team    (no weights yet: what `check` also makes)
         ──► world.py       residents of a cluster, the pool around them    (exists while a command runs)
               residents.py                                         (engines and trainers that compute)
         ──► wire.py        feed, rollout, collector, sessions, ..., and the orchestrator that joins them with the
                            journal: the same in every world
         ──► commands.py    train, evaluate, export
               ending.py    (signals, callbacks, lost workers: what ends a command)
         ──► simulation.py  the same run on modelled devices, in virtual time; nothing else imports the simulator
"""

from flexmarl.assemble.blueprint import (
    Blueprint,
    check_model,
    decoder_of,
    draw_up,
    load_tokenizer,
    model_source,
    open_tasks,
    seat_team,
    told_of,
)
from flexmarl.assemble.commands import TrainCommand, assemble_run, evaluate_once, newest_checkpoint, resume_hint
from flexmarl.assemble.ending import Supervisor
from flexmarl.assemble.export import Exported, export_policies, push
from flexmarl.assemble.simulation import simulate
from flexmarl.assemble.wire import wire
from flexmarl.assemble.world import World, open_world
from flexmarl.inference.backends.embedded.kv_cache import cached_numbers

__all__ = [
    "Blueprint",
    "Exported",
    "Supervisor",
    "TrainCommand",
    "World",
    "assemble_run",
    "cached_numbers",
    "check_model",
    "decoder_of",
    "draw_up",
    "evaluate_once",
    "export_policies",
    "load_tokenizer",
    "model_source",
    "newest_checkpoint",
    "open_tasks",
    "open_world",
    "push",
    "resume_hint",
    "seat_team",
    "simulate",
    "told_of",
    "wire",
]
