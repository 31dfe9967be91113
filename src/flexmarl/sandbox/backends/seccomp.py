"""Filter of system calls (BPF) for a box, written out for x86_64 and arm64: what reaches the kernel's riskier parts.

A box is closed by its namespaces. The filter takes away calls with which bugs of the kernel were exploited from inside
such a namespace, and those that no program of an agent needs. `bwrap --seccomp` installs it before the first
instruction of the box's program.
"""

import errno
import platform
import struct

from flexmarl.errors import ConfigError

REFUSED: dict[str, tuple[tuple[str, int | None, int | None], ...]] = {
    "namespaces: a new one gives its maker capabilities over the kernel": (("unshare", 272, 97), ("setns", 308, 268)),
    "mounts and roots: the view of files is the sandbox's to make": (
        ("mount", 165, 40),
        ("umount2", 166, 39),
        ("pivot_root", 155, 41),
        ("chroot", 161, 51),
        ("open_tree", 428, 428),
        ("move_mount", 429, 429),
        ("fsopen", 430, 430),
        ("fsconfig", 431, 431),
        ("fsmount", 432, 432),
        ("fspick", 433, 433),
        ("mount_setattr", 442, 442),
        ("swapon", 167, 224),
        ("swapoff", 168, 225),
        ("quotactl", 179, 60),
        ("quotactl_fd", 443, 443),
        ("name_to_handle_at", 303, 264),
        ("open_by_handle_at", 304, 265),
    ),
    "keys: rings are shared by all processes of a user, in any namespace": (
        ("add_key", 248, 217),
        ("request_key", 249, 218),
        ("keyctl", 250, 219),
    ),
    "programs in the kernel, and rings that pass by this filter": (
        ("bpf", 321, 280),
        ("perf_event_open", 298, 241),
        ("io_uring_setup", 425, 425),
        ("io_uring_enter", 426, 426),
        ("io_uring_register", 427, 427),
        ("userfaultfd", 323, 282),
    ),
    "other processes: a neighbour of the same box, such as the driver": (
        ("ptrace", 101, 117),
        ("process_vm_readv", 310, 270),
        ("process_vm_writev", 311, 271),
        ("pidfd_getfd", 438, 438),
        ("kcmp", 312, 272),
    ),
    "the machine: its kernel, clock, ports and log": (
        ("kexec_load", 246, 104),
        ("kexec_file_load", 320, 294),
        ("init_module", 175, 105),
        ("finit_module", 313, 273),
        ("delete_module", 176, 106),
        ("reboot", 169, 142),
        ("acct", 163, 89),
        ("syslog", 103, 116),
        ("settimeofday", 164, 170),
        ("clock_settime", 227, 112),
        ("adjtimex", 159, 171),
        ("clock_adjtime", 305, 266),
        ("iopl", 172, None),
        ("ioperm", 173, None),
        ("modify_ldt", 154, None),
        ("personality", 135, 92),
        ("lookup_dcookie", 212, 18),
        ("vhangup", 153, 58),
    ),
}
"""Calls that fail with EPERM: reason, then name, number on x86_64, number on arm64."""

CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
NEW_NAMESPACES = 0x7E02_0000
"""Flags of clone: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
FAMILIES = (1, 2, 10)
"""Sockets may be AF_UNIX, AF_INET and AF_INET6, which lead nowhere in a box: no netlink, packet, vsock, alg."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""ioctl TIOCSTI and TIOCLINUX, which type into a terminal."""
ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
X32 = 0x4000_0000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST, AT_SECOND = 0, 4, 16, 24
"""Offsets in seccomp_data; of an argument, its lower half."""


def failing(code: int) -> int:
    """The verdict with which a call fails."""
    return FAIL | code


def filter_of(machine: str | None = None) -> bytes:
    """The filter for a machine's processor, this one's by default. Raises ConfigError for one that it does not know."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigError(f"sandbox: there is no filter of system calls for {machine!r}; use x86_64 or aarch64")
    column, audit = ARCHITECTURES[machine]
    program: list[bytes] = []

    def emit(code: int, operand: int, yes: int = 0, no: int = 0) -> None:
        program.append(struct.pack("=HBBI", code, yes, no, operand))

    def verdict_if(number: int, verdict: int) -> None:
        emit(EQUAL, number, 0, 1)
        emit(RETURN, verdict)

    emit(LOAD, AT_ARCHITECTURE)
    emit(EQUAL, audit, 1, 0)
    emit(RETURN, KILL)
    emit(LOAD, AT_NUMBER)
    if machine == "x86_64":
        emit(AT_LEAST, X32, 0, 1)
        emit(RETURN, failing(errno.ENOSYS))
    for calls in REFUSED.values():
        for _, *numbers in calls:
            if (number := numbers[column]) is not None:
                verdict_if(number, failing(errno.EPERM))
    verdict_if(
        CLONE3[column], failing(errno.ENOSYS)
    )  # Its flags are in memory, where no filter looks; libc falls back.
    emit(EQUAL, CLONE[column], 0, 4)
    emit(LOAD, AT_FIRST)
    emit(ANY_BIT, NEW_NAMESPACES, 0, 1)
    emit(RETURN, failing(errno.EPERM))
    emit(RETURN, ALLOW)
    for call in (SOCKET, SOCKETPAIR):
        emit(EQUAL, call[column], 0, 6)
        emit(LOAD, AT_FIRST)
        for index, family in enumerate(FAMILIES):
            emit(EQUAL, family, len(FAMILIES) - index, 0)
        emit(RETURN, failing(errno.EAFNOSUPPORT))
        emit(RETURN, ALLOW)
    emit(EQUAL, IOCTL[column], 0, 3)
    emit(LOAD, AT_SECOND)
    for index, request in enumerate(TERMINAL_INPUT):
        emit(EQUAL, request, len(TERMINAL_INPUT) - index, 0)
    emit(RETURN, ALLOW)
    emit(RETURN, failing(errno.EPERM))
    return b"".join(program)
