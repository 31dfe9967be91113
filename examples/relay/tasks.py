"""Tasks of the relay: sightings, such as `C47`: thing C, in surroundings 47.

Only the thing is to be named. The surroundings tell training sightings from held-out ones: who has learned a word per
thing succeeds on both, who has learned sightings by heart only on the former.
"""

import random

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

THINGS = "ABCDEFGH"
SURROUNDINGS = 100
HELD_OUT = 4
"""Every fourth of the surroundings is held out."""


@task_generator("relay")
def sighting(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split; any eight in a row, from a multiple of eight on, show each thing once."""
    rng = random.Random(f"{seed}/{split}/{index}")
    thing = THINGS[index % len(THINGS)]
    around = rng.choice([number for number in range(SURROUNDINGS) if split_of(number) == split])
    return Task(input_id=f"{split}-{seed}-{index}", prompt=f"{thing}{around:02}", reference=thing)


def split_of(around: int) -> Split:
    """The one split in which these surroundings are."""
    return "held_out" if around % HELD_OUT == 0 else "train"
