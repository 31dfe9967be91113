"""Scripted runs as the stories that the laws judge."""

from flexmarl.records import InstanceId
from flexmarl.testing.faults.story import Life, Story
from flexmarl.testing.scripted_run import ScriptedRun


def story_of(*runs: ScriptedRun, folder: str = "") -> Story:
    """The story of a scripted run. Each of `runs` is a life; all but the last one were killed."""
    lives = [
        Life(
            events=run.events.all,
            error=run.failure if run is runs[-1] else None,
            killed=run is not runs[-1],
            hung=False,
            engines={InstanceId(policy, n): one for policy, many in run.engines.items() for n, one in enumerate(many)},
            trainers=run.trainers,
        )
        for run in runs
    ]
    return Story(settings=runs[-1].settings, chance=True, lives=lives, rows=tuple(runs[-1].rows()), folder=folder)
