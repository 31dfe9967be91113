"""Decides which event types exist. The journal is read by this table, and its page in the docs is made from it."""

from types import ModuleType

from flexmarl.events import group_events, run_events, serving_events, training_events
from flexmarl.events.event import Event

PAGES: dict[str, ModuleType] = {
    "The run": run_events,
    "Groups": group_events,
    "Serving": serving_events,
    "Training": training_events,
}
"""The modules that define event types, by the heading of their section in the docs."""


def events_in(module: ModuleType) -> list[type[Event]]:
    """The event types that a module defines, in the order of their definition."""
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Event)]
    return [one for one in found if one.__module__ == module.__name__]


CATALOGUE: dict[str, type[Event]] = {kind.name: kind for module in PAGES.values() for kind in events_in(module)}
"""Every event type, by its name in the journal."""
