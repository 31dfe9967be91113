"""Decides what trees saved, as figures of a micro-batch and of an update."""

from collections.abc import Iterable

from flexmarl.records import LossReport

ROW_TOKENS, SAVED = "row_tokens", "tokens_saved"
"""Sums of a LossReport: tokens of all rows, were each computed alone, and how many of them were shared."""


def tree_figures(reports: Iterable[LossReport]) -> dict[str, float]:
    """`tokens_saved`, and `tree_token_ratio`: tokens of rows over tokens computed, 1 where nothing was shared.

    >>> sums = {"row_tokens": 40.0, "tokens_saved": 30.0}
    >>> tree_figures([LossReport(micro_batch_id="m", num_samples=2, num_tokens=3.0, sums=sums)])
    {'tokens_saved': 30.0, 'tree_token_ratio': 4.0}
    """
    sums = [report.sums for report in reports]
    tokens, saved = (float(sum(each.get(name, 0.0) for each in sums)) for name in (ROW_TOKENS, SAVED))
    return {SAVED: saved, "tree_token_ratio": tokens / (tokens - saved)} if tokens else {}
