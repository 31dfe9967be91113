"""Failures of episodes on disk: the first of each kind, with its traceback.

    EpisodeBroke ──► Failures ──► runs/RUN/failures/01-ValueError-team.py-61.txt      `read_failures` reads it back

    {"kind": "ValueError", "text": "boom", "place": "team.py:61", "episode": "g0e3a0", ...}
                                                                                 an empty line, then the traceback
    Traceback (most recent call last):
      ...

A kind is a type of exception at one place. At most MOST_KINDS are kept, each with MOST_TRACE characters at most.
Secrets are masked (safe_json.py).
"""

import json
import re
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flexmarl.errors import described, writable
from flexmarl.events.event import Events
from flexmarl.events.notices import EpisodeBroke
from flexmarl.events.safe_json import masked, parse_json
from flexmarl.records.episode import Failure

MOST_KINDS = 50
"""Kinds that are kept of a run. A workflow whose every line fails must not fill the disk."""
MOST_TRACE = 8_000
"""Characters of a traceback that are kept. Its end is kept, because that names the error."""
MOST_FRAMES = 40
"""Innermost frames of a traceback that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFailure:
    """The first failure of a kind."""

    kind: str
    """As in `Failure`."""
    text: str
    """As in `Failure`."""
    place: str
    """As in `Failure`."""
    episode: str
    """Id of the episode."""
    task: str
    """Id of its task."""
    purpose: str
    """Why the episode was played: `training`, `greedy` or `evaluation`."""
    t: float
    """When it failed, in seconds on the clock of its command."""
    traceback: str = ""
    """The traceback; empty if no exception was raised."""

    @property
    def failure(self) -> Failure:
        """The failure itself."""
        return Failure(kind=self.kind, text=self.text, place=self.place)


class Failures:
    """Keeps the first failure of each kind, in files of a folder and in memory."""

    def __init__(self, folder: Path | None, events: Events | None = None) -> None:
        """Listens to `events`. Without a folder nothing is written. Kinds that the folder has are not kept again."""
        self._folder = folder
        self.kept = read_failures(folder) if folder else []
        """The kept failures, in the order in which they happened."""
        self._kinds = {(one.kind, one.place) for one in self.kept}
        if events is not None:
            self.listen(events)

    def listen(self, events: Events) -> None:
        """Keeps the failures that are emitted from now on."""
        events.listen(EpisodeBroke, lambda broke: self._keep(broke, events.now()))

    def _keep(self, broke: EpisodeBroke, t: float) -> None:
        failure = broke.failure
        if (failure.kind, failure.place) in self._kinds or len(self._kinds) >= MOST_KINDS:
            return
        self._kinds.add((failure.kind, failure.place))
        kept = KeptFailure(
            kind=masked(failure.kind),
            text=masked(failure.text),
            place=masked(failure.place),
            episode=broke.episode,
            task=masked(broke.task),
            purpose=broke.purpose,
            t=round(t, 6),
            traceback="" if broke.error is None else trace_of(broke.error),
        )
        self.kept.append(kept)
        if self._folder is not None:
            with suppress(OSError):  # The run must not end because a file of a failed episode cannot be written.
                self._folder.mkdir(exist_ok=True)
                (self._folder / file_name(len(self.kept), kept)).write_text(_as_text(kept), encoding="utf-8")


def trace_of(error: BaseException) -> str:
    """The traceback of any exception, without secrets, with at most MOST_TRACE characters."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-MOST_FRAMES)
        text = masked("".join(lines))
    except Exception:  # A foreign exception's type or cause may raise anything when it is read.
        text = masked(described(error))
    if len(text) > MOST_TRACE:
        text = f"... ({len(text) - MOST_TRACE} characters)\n{text[-MOST_TRACE:]}"
    return writable(text).strip()


def file_name(number: int, kept: KeptFailure) -> str:
    """Name of the file of the failure that was kept as number `number`, from 1."""
    parts = [f"{number:02}", *filter(None, (kept.kind, kept.place))]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:100] + ".txt"


def read_failures(folder: Path) -> list[KeptFailure]:
    """Reads the failures that a run kept, in the order in which they happened. A torn file is left out."""
    found: list[KeptFailure] = []
    for path in sorted(folder.glob("*.txt")):
        with suppress(OSError, ValueError, TypeError):
            head, _, trace = path.read_text(encoding="utf-8").partition("\n")
            found.append(KeptFailure(**parse_json(head), traceback=trace.strip()))
    return found


def _as_text(kept: KeptFailure) -> str:
    head = {name: value for name, value in asdict(kept).items() if name != "traceback"}
    return f"{json.dumps(head)}\n\n{kept.traceback}\n"
