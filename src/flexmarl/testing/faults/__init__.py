"""Breaks small random runs and checks the laws on each. In: seeds. Out: the faults that struck, and the laws broken.

    python -m flexmarl.testing.faults --seeds 0:3000

schedule.py              draws a small random run
fault_plan.py            a plan of faults, drawn from a seed or read from a file
injection.py, faulty.py  carry out a plan, with wrappers around engines, trainers, the store and the task source
planned.py               carries out a plan on a run of `flexmarl simulate`
lives.py                 plays a run and resumes it after every death
story.py                 the story of all lives: events, rows, and what engines and trainers remember
watched.py               wrappers that remember what the laws check
witness.py               which faults struck, and whether the system reacted
laws.py, laws_of_*.py    the laws, each a function of a story
mutations.py             rules broken on purpose: each one must break a law
trials.py                plays many seeds in several processes, and prints the results
"""
