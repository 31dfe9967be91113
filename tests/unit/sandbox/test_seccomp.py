"""The filter of system calls, read by an interpreter of BPF. In tests/sandbox, the kernel itself is asked."""

import errno
import struct

import pytest

from flexmarl.errors import ConfigError
from flexmarl.sandbox.backends import seccomp
from flexmarl.sandbox.backends.seccomp import ALLOW, ARCHITECTURES, FAIL, KILL, REFUSED, filter_of

MACHINES = ["x86_64", "aarch64"]


def verdict(machine: str, number: int, first: int = 0, second: int = 0, *, audit: int | None = None) -> int:
    """The verdict of the filter on one call."""
    program = list(struct.iter_unpack("=HBBI", filter_of(machine)))
    audit = ARCHITECTURES[machine][1] if audit is None else audit
    data = struct.pack("=IIQQQ", number, audit, 0, first, second)
    place, held = 0, 0
    while True:
        code, yes, no, operand = program[place]
        place += 1
        if code == seccomp.LOAD:
            held = struct.unpack_from("=I", data, operand)[0]
        elif code == seccomp.RETURN:
            return operand
        else:
            tests = {
                seccomp.EQUAL: held == operand,
                seccomp.AT_LEAST: held >= operand,
                seccomp.ANY_BIT: bool(held & operand),
            }
            place += yes if tests[code] else no


@pytest.mark.parametrize("machine", MACHINES)
def test_every_refused_call_fails_with_eperm_and_its_neighbours_are_allowed(machine):
    column = ARCHITECTURES[machine][0]
    refused = {numbers[column] for calls in REFUSED.values() for _, *numbers in calls} - {None}
    special = {call[column] for call in (seccomp.CLONE3, seccomp.SOCKET, seccomp.SOCKETPAIR)}
    for number in range(500):
        if number in refused:
            assert verdict(machine, number) == FAIL | errno.EPERM
        elif number not in special:
            assert verdict(machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_fails_with_a_flag_of_a_namespace_and_clone3_does_not_exist(machine):
    column = ARCHITECTURES[machine][0]
    threads = 0x3D0F00
    assert verdict(machine, seccomp.CLONE[column], threads) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert verdict(machine, seccomp.CLONE[column], threads | 1 << bit) == FAIL | errno.EPERM
    assert verdict(machine, seccomp.CLONE3[column]) == FAIL | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_are_of_three_families(machine):
    column = ARCHITECTURES[machine][0]
    for call in (seccomp.SOCKET, seccomp.SOCKETPAIR):
        allowed = [family for family in range(64) if verdict(machine, call[column], family) == ALLOW]
        assert allowed == [1, 2, 10]
        assert verdict(machine, call[column], 16) == FAIL | errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_types_into_a_terminal(machine):
    ioctl = seccomp.IOCTL[ARCHITECTURES[machine][0]]
    refused = [one for one in range(0x5400, 0x5480) if verdict(machine, ioctl, 0, one) != ALLOW]
    assert refused == [0x5412, 0x541C]


def test_calls_of_another_architecture_end_the_program_and_those_of_x32_do_not_exist():
    assert verdict("x86_64", 39, audit=ARCHITECTURES["aarch64"][1]) == KILL
    assert verdict("x86_64", 0x4000_0000 | 39) == FAIL | errno.ENOSYS


def test_an_unknown_processor_is_refused_by_name():
    with pytest.raises(ConfigError, match="riscv64"):
        filter_of("riscv64")
