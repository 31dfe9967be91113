"""Breaks small runs, and asks which laws still hold. In: a seed. Out: what was broken, and which law with it.

    python -m flexmarl.testing.faults --seeds 0:3000

schedule.py             a small random run
fault_plan.py            what goes wrong: a plan, drawn from a seed or read from a file
injection.py, faulty.py  carry a plan out: wrappers around engines, trainers, the store and the task source
watched.py               wrappers that remember what the laws ask
lives.py                the run, resumed after every death
story.py                what happened, put together from journals, rows and what engines and trainers remember
witness.py              which faults struck, and what the system did about them
laws.py, laws_of_*.py   the laws, each a function of a story
mutations.py            rules broken on purpose: each one must break a law
trials.py, report.py    many seeds in several processes, and what they showed
"""
