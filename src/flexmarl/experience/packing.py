"""Decides how claimed samples are cut into micro-batches, and a micro-batch into passes of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.experience.settings import PackingSettings


@dataclass(frozen=True, slots=True)
class Cut:
    """One micro-batch: positions in the list of samples, in order."""

    indices: tuple[int, ...]
    because: str
    """Why it ends where it ends."""


def cut_micro_batches(num_tokens: Sequence[int], settings: PackingSettings) -> list[Cut]:
    """Cuts samples with these token counts (prompt and response) where a limit is met, keeping their order.

    A sample that alone exceeds the token limit is a micro-batch of its own.

    >>> for cut in cut_micro_batches([3, 4, 9, 2], PackingSettings(max_samples=2, max_padded_tokens=8)):
    ...     print(cut.indices, cut.because)
    (0, 1) 2 samples are the most allowed
    (2,) it alone has 9 tokens, more than 8
    (3,) no sample is left
    """
    cuts: list[Cut] = []
    open_cut: list[int] = []

    def close(because: str) -> None:
        cuts.append(Cut(tuple(open_cut), because))
        open_cut.clear()

    limit = settings.max_padded_tokens
    for index, tokens in enumerate(num_tokens):
        longest = max((num_tokens[i] for i in open_cut), default=0)
        padded = (len(open_cut) + 1) * max(longest, tokens)
        if limit is not None and open_cut and padded > limit:
            alone = longest > limit
            close(
                f"it alone has {longest} tokens, more than {limit}"
                if alone
                else f"one more would pad to {padded} tokens, more than {limit}"
            )
        open_cut.append(index)
        if len(open_cut) == settings.max_samples:
            close(f"{settings.max_samples} samples are the most allowed")
    if open_cut:
        close("no sample is left")
    return cuts


def padding_groups(num_tokens: Sequence[int], max_padding_share: float) -> list[tuple[int, ...]]:
    """Splits a micro-batch into forward passes, longest samples first, none with a larger share of padding.

    The sums of the passes are the micro-batch's: gradients are un-normalised, so this saves time and changes nothing.

    >>> padding_groups([10, 100, 9, 90], max_padding_share=0.1)
    [(1, 3), (0, 2)]
    """
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    real = 0
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        if group:
            padded = (len(group) + 1) * num_tokens[group[0]]
            if padded - (real + num_tokens[index]) > max_padding_share * padded:
                groups.append(tuple(group))
                group, real = [], 0
        group.append(index)
        real += num_tokens[index]
    return [*groups, tuple(group)] if group else groups
