"""Attacks on a sandbox: programs that print THROUGH if they got through.

    surroundings = stack.enter_context(Surroundings.open())
    outcome = await attacked(sandbox, ATTACKS[0], surroundings)

An attack that does no harm is witnessed: the same program, in a plain process of the same user, does get through.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexmarl.sandbox.interface import BoxOutcome, Sandbox
from flexmarl.testing.sandbox import SMALL

THROUGH = "THROUGH"
Witness = Literal["any", "root", "none"]


@dataclass(frozen=True, slots=True)
class Attack:
    """A program that tries to get something it was not given."""

    name: str
    code: str
    """Python; it finds the names of `Surroundings.names`, and calls `through()` if it got through."""
    witness: Witness = "any"
    """The users that get through in a plain process, where the attack does no harm: any, root alone, or none."""


HEAD = """
import ctypes, errno, mmap, os, signal, socket, sys, threading, time
ARM = os.uname().machine == "aarch64"
libc = ctypes.CDLL(None, use_errno=True)
def through():
    print("THROUGH")
def allowed(x86, arm, *arguments):
    "True unless the call was refused: EPERM, ENOSYS or EAFNOSUPPORT."
    ctypes.set_errno(0)
    result = libc.syscall(arm if ARM else x86, *arguments)
    return result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT)
"""


def _tries(body: str) -> str:
    return f"try:\n    {body}\nexcept (OSError, ValueError, AttributeError):\n    pass"


def _reads(path: str) -> str:
    return _tries(f"open({path}, 'rb').read(1) and through()")


def _calls(x86: int, arm: int, *arguments: str) -> str:
    return f"allowed({', '.join([str(x86), str(arm), *arguments])}) and through()"


FILES = (
    Attack("read a file of the user", _reads("SECRET")),
    Attack("read the users of the machine", _reads("'/etc/passwd'")),
    Attack("read through the root of process 1", _reads("'/proc/1/root/etc/passwd'"), "none"),
    Attack("read through the working folder of the parent", _reads("'/proc/%d/cwd/etc/passwd' % os.getppid()"), "none"),
    Attack("read the environment of a process", _tries("MARK in os.environ.values() and through()")),
    Attack(
        "read the environment of all processes",
        "for pid in [one for one in os.listdir('/proc') if one.isdigit()]:\n"
        "    try:\n        MARK.encode() in open('/proc/' + pid + '/environ', 'rb').read() and through()\n"
        "    except OSError:\n        pass",
    ),
    Attack("write into a folder of the user", _tries("open(FOLDER + '/written', 'w').close() or through()")),
    Attack("link a file of the user", _tries("os.link(SECRET, FOLDER + '/link-%d' % os.getpid()); through()")),
    Attack("write into /usr", _tries("open('/usr/flexmarl-attack', 'w').close() or through()"), "none"),
    Attack("write beside the box", _tries("open('/flexmarl-attack', 'w').close() or through()"), "none"),
    Attack("change the driver", _tries("open('/driver.py', 'r+').close() or through()"), "none"),
    Attack("open core_pattern", _tries("open('/proc/sys/kernel/core_pattern', 'r+b').close() or through()"), "root"),
    Attack("open sysrq", _tries("open('/proc/sysrq-trigger', 'ab').close() or through()"), "none"),
    Attack("read the kernel's log", _tries("os.open('/dev/kmsg', os.O_RDONLY) and through()"), "root"),
    Attack("make a device", _tries("os.mknod('/tmp/flexmarl-%d' % os.getpid(), 0o060600, 1793); through()"), "none"),
    Attack("list control groups", _tries("os.listdir('/sys/fs/cgroup') and through()")),
    Attack("list homes", _tries("os.listdir('/home'); through()")),
    Attack("read shared memory of the machine", _reads("SHARED")),
    Attack(
        "use an inherited file",
        "for fd in range(3, 256):\n"
        "    try:\n        os.path.isfile('/proc/self/fd/%d' % fd) and os.pread(fd, 1, 0) and through()\n"
        "    except OSError:\n        pass",
        "none",
    ),
)
NETWORK = (
    Attack("connect to this machine", _tries("socket.create_connection(('127.0.0.1', PORT), 2) and through()")),
    Attack(
        "connect over IPv6 to a mapped address",
        "one = socket.socket(socket.AF_INET6)\n" + _tries("one.connect(('::ffff:127.0.0.1', PORT)); through()"),
        "none",
    ),
    Attack(
        "connect to an abstract socket",
        "one = socket.socket(socket.AF_UNIX)\n" + _tries("one.connect('\\0' + ABSTRACT); through()"),
    ),
    Attack(
        "connect to a socket in a folder",
        "one = socket.socket(socket.AF_UNIX)\n" + _tries("one.connect(SOCKET); through()"),
    ),
    Attack("see an interface", _tries("{name for _, name in socket.if_nameindex()} - {'lo'} and through()"), "none"),
    Attack("ask the kernel about routes", _tries("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) and through()")),
    Attack("read packets", _tries("socket.socket(socket.AF_PACKET, socket.SOCK_RAW) and through()"), "root"),
    Attack("send raw packets", _tries("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and through()"), "root"),
    Attack(
        "open a socket of the kernel's ciphers",
        _tries("socket.socket(38, socket.SOCK_SEQPACKET) and through()"),
        "none",
    ),
    Attack(
        "open a socket to the host of a machine", _tries("socket.socket(40, socket.SOCK_STREAM) and through()"), "none"
    ),
    Attack("find a name", _tries("socket.getaddrinfo('pypi.org', 443) and through()"), "none"),
)
PROCESSES = (
    Attack("signal a process", _tries("os.kill(PID, 0) or through()")),
    Attack("see a process", _tries("os.stat('/proc/%d/status' % PID) and through()")),
    Attack("see processes of others", "len([one for one in os.listdir('/proc') if one.isdigit()]) > 8 and through()"),
    Attack("find shared memory by its key", "libc.shmget(KEY, 0, 0) >= 0 and through()"),
    Attack("raise its own priority", _tries("os.setpriority(os.PRIO_PROCESS, 0, -5); through()"), "root"),
    Attack("be traced", _calls(101, 117, "0", "0", "0", "0")),
    Attack("read memory of a process", _calls(310, 270, "os.getpid()", "None", "0", "None", "0", "0")),
    Attack("write memory of a process", _calls(311, 271, "os.getpid()", "None", "0", "None", "0", "0")),
    Attack(
        "raise a limit",
        "import resource\n" + _tries("resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600)); through()"),
    ),
)
KERNEL = (
    Attack("make a user namespace", _calls(272, 97, "0x10000000")),
    Attack(
        "clone into a user namespace",
        "pid = libc.syscall(220 if ARM else 56, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if pid == 0:\n    os._exit(0)\n"
        "if pid > 0:\n    os.waitpid(pid, 0); through()",
    ),
    Attack("clone in the new way", _calls(435, 435, "None", "0")),
    Attack("enter a namespace", _calls(308, 268, "-1", "0")),
    Attack("mount", _calls(165, 40, "None", "None", "None", "0", "None"), "root"),
    Attack("open a file system", _calls(430, 430, "None", "0"), "root"),
    Attack("change the root", _calls(161, 51, "b'/nothing'"), "any"),
    Attack("open a file by its handle", _calls(304, 265, "-1", "None", "0"), "root"),
    Attack("read a ring of keys", _calls(250, 219, "0", "-3", "1")),
    Attack("add a key", _calls(248, 217, "None", "None", "None", "0", "-3")),
    Attack("load a program into the kernel", _calls(321, 280, "999", "None", "0"), "root"),
    Attack("watch performance", _calls(298, 241, "None", "0", "-1", "-1", "0"), "any"),
    Attack("open a ring into the kernel", _calls(425, 425, "1", "None"), "any"),
    Attack("handle page faults", _calls(323, 282, "1"), "any"),
    Attack("load a module", _calls(313, 273, "-1", "b''", "0"), "none"),
    Attack("load another kernel", _calls(246, 104, "0", "0", "None", "0xffff"), "none"),
    Attack("set the clock", _calls(227, 112, "0", "None"), "any"),
    Attack("read the log of the kernel", _calls(103, 116, "10", "None", "0"), "root"),
    Attack("reboot", _calls(169, 142, "0", "0", "0", "None"), "root"),
    Attack("change its personality", _calls(135, 92, "0xffffffff")),
    Attack("type into a terminal", _calls(16, 29, "0", "0x5412", "b'x'")),
    Attack("call by the numbers of x32", "ARM or allowed(0x40000000 + 39, 0) and through()", "none"),
)
ROOM = (
    Attack(
        "more memory in children than the box has",
        "children = []\nfor _ in range(6):\n    pid = os.fork()\n    if pid == 0:\n"
        "        held = bytearray(24 << 20); time.sleep(1); os._exit(0)\n    children.append(pid)\n"
        "all(os.waitpid(pid, 0)[1] == 0 for pid in children) and through()",
    ),
    Attack(
        "more memory in files than the box has",
        "written, paths = 0, []\nfor folder in ('/box', '/tmp', '/dev/shm', FOLDER):\n    for _ in range(2):\n"
        "        path = '%s/flexmarl-fill-%d-%d' % (folder, os.getpid(), len(paths))\n        try:\n"
        "            with open(path, 'wb', buffering=0) as file:\n                paths.append(path)\n"
        "                for _ in range(31):\n                    written += file.write(bytes(1 << 20))\n"
        "        except OSError:\n            pass\n"
        "for path in paths:\n    os.unlink(path)\nwritten > 96 << 20 and through()",
    ),
    Attack(
        "a larger file than the box may have",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = ('/box' if os.path.isdir('/box') else FOLDER) + '/large'\n"
        + _tries("open(path, 'wb').close(); os.truncate(path, 1 << 33); through()")
        + "\nos.unlink(path)",
    ),
    Attack(
        "more processes than the box has",
        "children = []\ntry:\n    for _ in range(64):\n        pid = os.fork()\n        if pid == 0:\n"
        "            time.sleep(2); os._exit(0)\n        children.append(pid)\nexcept OSError:\n    pass\n"
        "for pid in children:\n    os.kill(pid, 9); os.waitpid(pid, 0)\nlen(children) == 64 and through()",
    ),
    Attack(
        "more threads than the box has",
        "stop, made = threading.Event(), []\ntry:\n    for _ in range(64):\n"
        "        one = threading.Thread(target=stop.wait); one.start(); made.append(one)\n"
        "except RuntimeError:\n    pass\nstop.set()\nlen(made) == 64 and through()",
    ),
    Attack(
        "more open files than the box has",
        "held = []\ntry:\n    for _ in range(600):\n        held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError:\n    pass\nlen(held) == 600 and through()",
    ),
    Attack(
        "a million files",
        "made = 0\nfolder = '/box' if os.path.isdir('/box') else FOLDER\ntry:\n    for made in range(1, 400_001):\n"
        "        os.close(os.open('%s/%d' % (folder, made), os.O_CREAT | os.O_WRONLY))\nexcept OSError:\n    pass\n"
        "made == 400_000 and through()",
        "none",
    ),
)
ATTACKS: tuple[Attack, ...] = (*FILES, *NETWORK, *PROCESSES, *KERNEL, *ROOM)

ENDLESS: tuple[tuple[str, str], ...] = (
    ("a loop", "while True: pass"),
    (
        "a loop that catches everything",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ),
    ("a sleep", "import time\ntime.sleep(600)"),
    ("a loop without its alarm", "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"),
    ("a stopped process", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    ("a loop in C", "import re\nre.match('(a*)*b', 'a' * 64)"),
    ("a child that holds all", "import os\npid = os.fork()\nwhile True: pass"),
    (
        "a read of the channel",
        "import os\nfor fd in range(3, 64):\n    try:\n        while os.read(fd, 1): pass\n"
        "    except OSError: pass\n"
        "while True: pass",
    ),
)
"""Programs that do not end by themselves, with their names."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Things of this machine that no box may reach."""

    names: dict[str, object]
    """Names that attacks find: SECRET, FOLDER, SHARED, PORT, ABSTRACT, SOCKET, PID, KEY, MARK."""

    @classmethod
    @contextmanager
    def open(cls) -> Iterator["Surroundings"]:
        """Makes them: files, listeners, a process, shared memory."""
        import ctypes

        libc, key, number = ctypes.CDLL(None), 0x666C0000 | os.getpid() & 0xFFFF, os.getpid()
        shared = Path(f"/dev/shm/flexmarl-attack-{number}")
        with (
            tempfile.TemporaryDirectory(prefix="flexmarl-") as name,
            socket.create_server(("127.0.0.1", 0)) as listener,
        ):
            os.chmod(name, 0o777)
            (secret := Path(name) / "secret").write_text("secret")
            secret.chmod(0o644)
            shared.write_text("secret")
            with socket.socket(socket.AF_UNIX) as hidden, socket.socket(socket.AF_UNIX) as placed:
                hidden.bind(f"\0flexmarl-attack-{number}")
                placed.bind(f"{name}/socket")
                os.chmod(f"{name}/socket", 0o777)
                hidden.listen()
                placed.listen()
                segment = libc.shmget(key, 4096, 0o1000 | 0o666)
                victim = subprocess.Popen(["sleep", "600"])
                try:
                    yield cls(
                        {
                            "SECRET": str(secret),
                            "FOLDER": name,
                            "SHARED": str(shared),
                            "KEY": key,
                            "PORT": listener.getsockname()[1],
                            "ABSTRACT": f"flexmarl-attack-{number}",
                            "SOCKET": f"{name}/socket",
                            "PID": victim.pid,
                            "MARK": f"mark-{number}",
                        }
                    )
                finally:
                    victim.kill()
                    victim.wait()
                    libc.shmctl(segment, 0, None)
                    shared.unlink()

    def program(self, attack: Attack) -> str:
        """The whole program of an attack."""
        return "".join((*(f"{name} = {value!r}\n" for name, value in self.names.items()), HEAD, attack.code))


async def attacked(
    sandbox: Sandbox, attack: Attack, surroundings: Surroundings, *, timeout_s: float = 60.0
) -> BoxOutcome:
    """Runs an attack in a box of its own."""
    async with sandbox.open({}, SMALL) as box:
        return await box.run(surroundings.program(attack), timeout_s=timeout_s)


def gets_through(attack: Attack, surroundings: Surroundings) -> bool:
    """Runs an attack in a plain process of this user. True if it gets through."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", surroundings.program(attack)],
        env={"MARK": str(surroundings.names["MARK"])},
        capture_output=True,
        text=True,
        check=False,
    )
    return THROUGH in ran.stdout
