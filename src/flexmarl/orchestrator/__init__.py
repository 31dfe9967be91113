"""The joint orchestrator: the loops that make up a run. In: tasks. Out: trained policies, checkpoints, evaluations."""
