"""Wires a run: the only place that names backends. In: settings. Out: a run that trains, evaluates or exports.

settings ──► blueprint.py   folder, code, tasks, renderers, team    (no weights yet: what `check` also makes)
         ──► world.py       residents of a cluster, the pool around them    (exists while a command runs)
               residents.py                                         (engines and trainers that compute)
         ──► wire.py        feed, rollout, collector, sessions, ..., and the orchestrator that joins them with the
                            journal: the same in every world
         ──► commands.py    train, evaluate, export
               ending.py    (signals, callbacks, lost workers: what ends a command)
         ──► simulation.py  the same run on modelled devices, in virtual time; nothing else imports the simulator

It has no names of its own: the process of a resident imports residents.py, and not what a command needs besides.
"""
