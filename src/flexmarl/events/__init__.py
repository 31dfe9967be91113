"""Events of a run, as types. In: events that parts emit. Out: calls of listeners; journal, metrics, screen."""
