from flexmarl.analysis.costs import SharedHost
from flexmarl.simulator.decoding import CpuShare

LAPTOP = SharedHost(engine_per_trainer=0.5, engine_per_engine=0.25, trainer_per_engine=2.0, trainer_per_trainer=4.0)


def test_everybody_is_slowed_down_by_the_others_that_work() -> None:
    host = CpuShare(LAPTOP)
    host.engine_busy(lambda: None)
    assert (host.engine_factor(), host.trainer_factor()) == (1.0, 3.0)
    with host.busy_trainer():
        host.engine_busy(print)
        assert (host.engine_factor(), host.trainer_factor()) == (1.0 + 0.5 + 0.25, 1.0 + 2 * 2.0)
        with host.busy_trainer():
            assert host.trainer_factor() == 1.0 + 2 * 2.0 + 4.0
    host.engine_idle(print)
    assert host.engine_factor() == 1.0


def test_busy_engines_are_told_when_their_factor_has_changed() -> None:
    host, told = CpuShare(LAPTOP), list[str]()
    host.engine_busy(lambda: told.append("first"))
    assert told == []
    with host.busy_trainer():
        assert told == ["first"]
    assert told == ["first", "first"]


def test_devices_of_their_own_slow_nobody_down() -> None:
    host, told = CpuShare(), list[str]()
    host.engine_busy(lambda: told.append("first"))
    host.engine_busy(print)
    with host.busy_trainer():
        assert host.engine_factor() == host.trainer_factor() == 1.0
    assert told == []
