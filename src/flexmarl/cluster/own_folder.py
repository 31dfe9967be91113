"""Folders of this user alone, in places where others may write too; and the free space of a disk.

    /tmp/flexmarl-1000      anybody can guess the name, and anybody may make it first

A user who makes it first owns what we find in it. A symbolic link of that name leads wherever its maker likes. So a
folder with such a name is used only if it is a folder, ours, closed to others, and if nobody else can replace it:

    every folder above it   root's or ours; if others may write in it, it is sticky: they cannot rename what is ours
    the folder itself       opened without following a link, and checked through its descriptor

After these checks no other user can change what a path inside it leads to, so no moment between check and use can be
exploited.

`require_space` is called before much is written: a full disk is then noticed while nothing is half-written.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexmarl.errors import CheckpointError, ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# The kernel follows as many symbolic links.
MOST_LINKS = 40
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
REMEDY = "remove it, or set TMPDIR to a folder of your own"


def own_folder(path: Path) -> Path:
    """Makes a folder for this user alone unless it exists, and returns its path without links.

    Raises ConfigError if another user owns it, may write in it, or could put another folder in its place, and if a link
    or a file has its name. Raises FileNotFoundError if its parent does not exist.
    """
    place = path.parent.resolve() / path.name
    for above in place.parents:
        if why := _replaceable(above.lstat()):
            raise ConfigError(f"'{place}' is not safe: '{above}' {why}; set TMPDIR to a folder of your own")
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    with opened(place):
        return place


def keep_compiled_code() -> None:
    """Makes torch store and load compiled code in the user's cache, unless TORCHINDUCTOR_CACHE_DIR names a folder.

    Torch's own choice is `torchinductor_{user}` in the temp folder, whoever made that. Must be called before anything
    imports `torch._dynamo`. Raises ConfigError if another user planted the folder.
    """
    named = os.environ.get(COMPILED)
    folder = Path(named) if named else _cache() / "torchinductor"
    check_not_planted(folder, COMPILED)
    os.environ[COMPILED] = str(folder)


def _cache() -> Path:
    """The user's cache folder, or a folder of theirs alone in the temp folder if their home is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexmarl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return own_folder(Path(tempfile.gettempdir()) / f"flexmarl-{os.getuid()}-cache")
    return folder


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Opens a folder of this user alone. The descriptor stays with that folder, whatever its name leads to later.

    Raises FileNotFoundError if there is none, ConfigError if another user owns it or may write in it.
    """
    try:
        handle = open_folder(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"'{path}' {not_ours(path.lstat()) or error.strerror}; {REMEDY}") from None
    try:
        if why := not_ours(os.fstat(handle)):
            raise ConfigError(f"'{path}' {why}; {REMEDY}")
        yield handle
    finally:
        os.close(handle)


def open_folder(path: Path | str, *, inside: int | None = None) -> int:
    """Opens a folder, whoever owns it, and returns its descriptor. Raises OSError for anything else or a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)


@contextmanager
def folder_at(inside: int | None, name: str | Path) -> Iterator[int]:
    """Opens a folder by its name in the folder `inside`, or by its path. Raises OSError for anything else or a link."""
    folder = open_folder(name, inside=inside)
    try:
        yield folder
    finally:
        os.close(folder)


def exists_at(inside: int, name: str) -> bool:
    """True if the folder `inside` has something of this name. A link counts, wherever it leads."""
    try:
        os.stat(name, dir_fd=inside, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def locked(folder: int, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a folder inside the block. Raises BlockingIOError if it is taken and `wait` is False."""
    fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def not_ours(status: os.stat_result) -> str:
    """The reason why something is not a folder of this user alone; empty if it is one."""
    if stat.S_ISLNK(status.st_mode):
        return f"is a symbolic link, made by user {status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        return f"is no folder, and belongs to user {status.st_uid}"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to us (user {os.getuid()})"
    if status.st_mode & OTHERS_WRITE:
        return f"may be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def check_not_planted(path: Path, setting: str) -> None:
    """Raises ConfigError if another user has made a part of this path where everyone may write, such as in /tmp.

    Elsewhere another user's folder is allowed: only few may make one there, for instance a group's folder of runs.
    """
    current, names, links = Path("/"), [*reversed(path.absolute().parts[1:])], 0
    while names:
        name = names.pop()
        if name == "..":
            current = current.parent
            continue
        entry = current / name
        try:
            status = entry.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"{setting}: '{path}' cannot be a folder: {error.strerror}; use a folder of your own"
            ) from None
        if current.stat().st_mode & stat.S_IWOTH and status.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"{setting}: '{entry}' belongs to user {status.st_uid}, not to us (user {os.getuid()}), and lies in "
                f"'{current}', where everyone may write; use a folder of your own"
            )
        if not stat.S_ISLNK(status.st_mode):
            current = entry
            continue
        links += 1
        if links > MOST_LINKS:
            raise ConfigError(f"{setting}: '{path}' has too many symbolic links; use a folder of your own")
        target = entry.readlink()
        current = Path("/") if target.is_absolute() else current
        names += reversed([part for part in target.parts if part != "/"])


def check_ours(path: Path, setting: str) -> None:
    """Raises ConfigError if an existing folder belongs to another user, or if everyone may write in it."""
    check_not_planted(path, setting)
    for status in (path.lstat(), path.stat()):
        if status.st_uid != os.getuid():
            what = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder"
            raise ConfigError(
                f"{setting}: the {what} '{path}' belongs to user {status.st_uid}, not to us (user {os.getuid()}); "
                f"run as that user, or use a copy of your own"
            )
    if path.stat().st_mode & stat.S_IWOTH:
        raise ConfigError(f"{setting}: everyone may write in '{path}'; check what is in it, then: chmod o-w")


def _replaceable(folder: os.stat_result) -> str:
    """The reason why others could replace what is in this folder; empty if they cannot."""
    if folder.st_uid not in (os.getuid(), 0, *_hidden_users()):
        return f"belongs to user {folder.st_uid}, who may put another folder in its place"
    if folder.st_mode & OTHERS_WRITE and not folder.st_mode & stat.S_ISVTX:
        return f"lets others put another folder in its place (mode {stat.S_IMODE(folder.st_mode):o}, not sticky)"
    return ""


def _hidden_users() -> Iterator[int]:
    """Yields the user id that a container shows for host users that it does not map, root among them."""
    with suppress(OSError, ValueError):
        hidden = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(first <= hidden < first + count for first, _, count in ranges):
            yield hidden


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raises CheckpointError if `what`, of `num_bytes`, does not fit on the disk of `folder`, which must exist."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"no room for {what} in {folder}: it takes about {num_bytes / 1e9:.3g} GB, {free / 1e9:.3g} GB are free; "
            f"free some there, or lower checkpoint.keep or checkpoint.budget_gb"
        )
