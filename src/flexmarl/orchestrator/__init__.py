"""The joint orchestrator: one loop per arrow of the picture. In: tasks. Out: policies that got better, and the proof."""
