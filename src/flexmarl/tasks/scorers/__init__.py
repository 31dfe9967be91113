"""Scores that must be waited for. In: a task and an answer. Out: a number, from a box where the answer is code.

scores.py         Scores: awaits the scorer of a task, once for equal answers
python_tests.py   code, by hidden tests
"""

from flexmarl.tasks.scorers.scores import BoxedScorer, Scores, needs_box

__all__ = ["BoxedScorer", "Scores", "needs_box"]
