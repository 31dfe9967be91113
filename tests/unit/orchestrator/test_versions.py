"""Which version is served, and whether a turn fits it."""

from dataclasses import replace

import pytest

from flexmarl.errors import TrainingError
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import PolicyName, Version, VersionRun
from tests.unit.orchestrator.groups import turn_of

SOLVER = PolicyName("solver")


def test_a_version_is_served_once_it_is_acknowledged_and_never_goes_back():
    versions = Versions({SOLVER: Version(3)})
    versions.acknowledged(SOLVER, Version(3))
    versions.acknowledged(SOLVER, Version(5))
    assert versions.served == {SOLVER: 5}
    with pytest.raises(TrainingError, match="policy 'solver' serves version 5; 4 would go back"):
        versions.acknowledged(SOLVER, Version(4))
    assert versions.served == {SOLVER: 5}


def test_what_was_served_stays_as_it_was_asked():
    versions = Versions({SOLVER: Version(0)})
    before = versions.served
    versions.acknowledged(SOLVER, Version(1))
    assert before == {SOLVER: 0}


def test_every_token_must_be_of_the_served_version():
    versions = Versions({SOLVER: Version(4)})
    versions.check([turn_of(0, 0, 0, version=4)], max_staleness=0)
    swapped = replace(turn_of(0, 0, 0), versions=(VersionRun(0, Version(4)), VersionRun(1, Version(5))))
    for turn, told in ((turn_of(0, 0, 0, version=3), "token 0 .* version 3"), (swapped, "token 1 .* version 5")):
        with pytest.raises(TrainingError, match=f"task-0_0_g0e0a0: {told} of 'solver', but .* on version 4"):
            versions.check([turn], max_staleness=0)
