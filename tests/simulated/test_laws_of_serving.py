"""What the law of instances makes of a journal: a policy that has none, and gets none, has given its last one away."""

import pytest

from flexmarl.events.serving_events import InstanceLost, InstanceReplaced, Moved, MoveFailed
from flexmarl.events.training_events import DevicesFreed, Swapped
from flexmarl.records import CONTROLLER, InstanceId, PolicyName, Version, WorkerId
from flexmarl.testing.faults.laws_of_serving import law_4_nothing_is_held_twice
from flexmarl.testing.faults.story import Life, Story
from flexmarl.testing.scripted_run import ScriptedRun

FIRST, BECAME = InstanceId("solver", 0), InstanceId("verifier", 1)
MOVED = Moved(process=WorkerId.engine(BECAME), began=0.0, instance=FIRST, to=PolicyName("verifier"), became=BECAME)
BEREFT = ["life 0: solver/0 was moved, the last of its policy"]


def lost(instance):
    return InstanceLost(instance=InstanceId.parse(instance), because="planned")


def replaced(old, new):
    came = InstanceId.parse(new)
    return InstanceReplaced(
        process=WorkerId.engine(came), began=0.0, instance=came, replaces=InstanceId.parse(old), version=Version(0)
    )


def failed(because):
    return MoveFailed(instance=InstanceId("solver", 1), to=PolicyName("verifier"), because=because)


def freed(by, began, ended):
    return DevicesFreed(process=CONTROLLER, began=began, ended=ended, by=by)


def swap(direction, began, ended):
    solver = PolicyName("solver")
    process = WorkerId.trainer("solver")
    return Swapped(process=process, began=began, ended=ended, policy=solver, direction=direction, place=0)


def judged(*events, replacements=0, mode="microbatch"):
    """What the law says of two solvers and a verifier."""
    settings = ScriptedRun(
        agents={"solver": "solver", "verifier": "verifier"},
        policies={"solver": {"instances": 2}},
        pool={"replacements": replacements},
        mode=mode,
    ).settings
    life = Life(events=events, error=None, killed=False, hung=False, engines={}, trainers={})
    return list(law_4_nothing_is_held_twice(Story(settings=settings, lives=[life], rows=[])))


@pytest.mark.parametrize(
    ("before", "replacements", "broken"),
    [
        ([], 0, []),
        ([lost("solver/1")], 0, BEREFT),
        ([lost("solver/1")], 1, []),
        ([lost("solver/1"), replaced("solver/1", "solver/2")], 1, []),
        ([lost("solver/1"), replaced("solver/1", "solver/2"), lost("solver/2")], 1, BEREFT),
        ([lost("solver/1"), lost("solver/2")], 1, BEREFT),
        ([failed("'solver/1' cannot be moved to 'verifier': the pool is asleep")], 0, []),
        ([lost("verifier/1"), failed("'solver/1' was not moved to 'verifier': loading version 1 failed")], 1, BEREFT),
    ],
)
def test_a_policy_has_given_its_last_instance_away_when_none_serves_and_none_is_on_its_way(
    before, replacements, broken
):
    assert judged(*before, MOVED, replacements=replacements) == broken


LENT, BACK = freed("engines", 0.0, 1.0), freed("trainers", 5.0, 6.0)
HERE, AWAY = swap("resume", 1.0, 2.0), swap("suspend", 5.0, 6.0)
MEANWHILE = "life 0: trainer/solver has its resume while engines have the devices"
STAYS = "life 0: ['trainer/solver'] are on devices that the trainers have given up"


@pytest.mark.parametrize(
    ("events", "broken"),
    [
        ([LENT, HERE, AWAY, BACK], []),
        ([HERE, LENT, AWAY, BACK], [MEANWHILE, STAYS.replace("the trainers", "the engines")]),
        ([LENT, swap("resume", 0.5, 2.0), AWAY, BACK], [MEANWHILE]),
        ([LENT, HERE, BACK], [STAYS]),
        ([LENT, HERE, AWAY, BACK, swap("resume", 7.0, 8.0)], [MEANWHILE]),
    ],
)
def test_a_trainer_and_an_engine_are_two_tenants_of_a_colocated_device(events, broken):
    assert judged(*events, mode="colocated") == broken
    assert judged(*events) == [], "in other modes they have devices of their own"
