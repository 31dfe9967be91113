"""Log of a run on a terminal or in a file, a line per event, by level.

| level   | screen of a run                | log                                                       |
|---------|--------------------------------|-----------------------------------------------------------|
| error   | only the last line, its folder | nothing: an error ends the command, which prints it       |
| warning | only the last line, its folder | what went wrong and was survived (`SURVIVED`)             |
| info    | all                            | the same, but for what the screen prints already          |
| debug   | all                            | every event, as the journal has it: decisions and reasons |
"""

from collections.abc import Callable
from enum import StrEnum

from flexmarl.events.event import Event, to_json
from flexmarl.events.run_events import CheckpointFailed, CheckpointPassedOver, MonitorFailed, WorkerLost
from flexmarl.events.safe_json import json_text
from flexmarl.events.serving_events import InstanceLost, MoveFailed

ON_SCREEN = (CheckpointFailed, CheckpointPassedOver)
SURVIVED = (*ON_SCREEN, WorkerLost, InstanceLost, MoveFailed, MonitorFailed)
"""Events that the user should know of, though the run goes on."""


class LogLevel(StrEnum):
    """How much a command prints."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"

    @property
    def quiet(self) -> bool:
        """True if a run shows no progress and no tables."""
        return self in (LogLevel.ERROR, LogLevel.WARNING)


class EventLog:
    """Listener that writes the events of a level, one line each. Secrets are masked as in the journal."""

    def __init__(self, level: LogLevel, write: Callable[[str], None]) -> None:
        self._level, self._write = level, write

    def hear(self, event: Event) -> None:
        """Writes the event if its level asks for it."""
        if self._level is LogLevel.DEBUG:
            self._write(f"flexmarl: debug: {json_text(to_json(event))}")
            return
        shown = {LogLevel.WARNING: SURVIVED, LogLevel.INFO: tuple(set(SURVIVED) - set(ON_SCREEN))}.get(self._level, ())
        if isinstance(event, shown):
            lost = next(
                (f"{getattr(event, field)}: " for field in ("process", "instance") if hasattr(event, field)), ""
            )
            self._write(f"flexmarl: warning: at {event.t:.1f} s, {event.name}: {lost}{event.because}")
