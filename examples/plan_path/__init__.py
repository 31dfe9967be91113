"""Plan and path: a planner that sees the map and cannot move, an executor that moves and cannot see the map."""
