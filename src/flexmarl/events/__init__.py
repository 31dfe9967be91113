"""What happened in a run, as types. In: events that parts emit. Out: who listens to them; journal, metrics, screen."""
