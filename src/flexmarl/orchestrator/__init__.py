"""The joint orchestrator: one loop per arrow of the picture. In: tasks. Out: better policies, and the proof."""
