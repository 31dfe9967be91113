"""Differences of pieces: `patch` makes the very bytes of the new piece, or says that it did not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.cluster.file_delta import difference, patch

HEAD_BYTES = 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64)


def patched(delta: bytes, base: np.ndarray) -> np.ndarray | None:
    """What `patch` makes of the base, in memory that held something else; None if it says that it is wrong."""
    into = np.full_like(base, 0xAA)
    return into if patch(delta, base, into) else None


def random_piece(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, number, np.uint8)


@given(
    number=st.integers(0, 5000), seed=st.integers(0, 9), share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.2, 0.5, 1.0])
)
def test_a_difference_makes_the_new_piece_of_the_old_one_and_is_at_most_half_as_large(
    number: int, seed: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    base = random_piece(number, seed)
    new = base.copy()
    words = new[: number // 2 * 2].view(np.uint16)
    words[random.random(len(words)) < share] ^= np.uint16(0x8001)
    if number % 2 and seed % 2:
        new[-1] ^= 1
    delta = difference(base, new)
    assert 2 * len(delta) <= number
    if delta:
        made = patched(delta, base)
        assert made is not None
        assert made.tobytes() == new.tobytes()
    else:
        assert share >= 0.2 or number < 300


@given(dtype=st.sampled_from(DTYPES), changes=st.dictionaries(st.integers(0, 4095), st.integers(0, 127), max_size=40))
def test_numbers_of_any_type_come_out_bit_by_bit(dtype: torch.dtype, changes: dict[int, int]) -> None:
    tensor = torch.arange(4096).to(dtype)
    changed = tensor.clone()
    for position, value in changes.items():
        changed[position] = value
    base, new = (one.view(torch.uint8).numpy() for one in (tensor, changed))
    made = patched(difference(base, new), base)
    assert made is not None
    assert made.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nan_and_negative_zero_are_numbers_like_others(dtype: torch.dtype) -> None:
    nan, other_nan = float("nan"), -float("nan")
    tensor = torch.tensor([0.0, -0.0, nan, 1.0, nan] + [nan] * 200, dtype=dtype)
    changed = tensor.clone()
    changed[:4] = torch.tensor([-0.0, 0.0, 2.0, other_nan], dtype=dtype)
    base, new = (one.view(torch.uint8).numpy() for one in (tensor, changed))
    delta = difference(base, new)
    made = patched(delta, base)
    assert made is not None
    assert made.tobytes() == new.tobytes()
    assert len(delta) < HEAD_BYTES + 20, "the NaN that stayed did not cross"


@pytest.mark.parametrize("gaps", [[254], [255], [256], [509], [510], [511], [0, 255, 0, 1, 765], []])
def test_any_number_of_unchanged_words_may_lie_between_two_changes(gaps: list[int]) -> None:
    base = np.zeros(8000, np.uint8)
    new = base.copy()
    for position in np.cumsum([gap + 1 for gap in gaps]) - 1 if gaps else []:
        new.view(np.uint16)[position] = 7
    made = patched(difference(base, new), base)
    assert made is not None
    assert made.tobytes() == new.tobytes()


def test_a_large_piece_is_given_up_where_it_first_does_not_pay() -> None:
    """The part that would pay comes too late: not compared any more, it can be a trap."""

    class Trap(np.ndarray):
        """Raises if more than 2 MiB of it are compared at a time or later on."""

        def __getitem__(self, key):
            if isinstance(key, slice) and key.start and key.start >= 1 << 19:
                raise AssertionError("compared after it was clear that it does not pay")
            return super().__getitem__(key)

    base = np.zeros(8 << 20, np.uint8)
    new = base.copy()
    new[: 1 << 20] = 1
    assert difference(base.view(Trap), new.view(Trap)) == b""
    new = base.copy()
    new[: 1 << 18] = 1
    assert len(difference(base, new)) == pytest.approx(3 << 17, rel=0.1), (
        "a dense quarter of the first MiB is no reason"
    )


def small_change() -> tuple[np.ndarray, np.ndarray, bytes]:
    base = random_piece(4001)
    new = base.copy()
    new[[10, 500, 501, 3999]] ^= 9
    return base, new, difference(base, new)


def test_a_difference_from_another_base_is_found_out() -> None:
    base, _, delta = small_change()
    assert patched(delta, base) is not None
    for at in (0, 700, 3990):
        other = base.copy()
        other[at] ^= 64
        assert patched(delta, other) is None
    assert patched(delta, base[:4000]) is None
    assert patched(delta, np.zeros(4001, np.uint8)) is None


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 60))
def test_a_damaged_difference_is_found_out(at: int, flip: int, cut: int) -> None:
    base, new, delta = small_change()
    damaged = bytearray(delta)
    damaged[at % len(delta)] ^= flip
    late = delta[:HEAD_BYTES] + bytes([delta[HEAD_BYTES] + 1]) + delta[HEAD_BYTES + 1 :]
    assert patched(late, base) is None, "the last place is behind the piece"
    for wrong in (bytes(damaged), delta[: len(delta) - 1 - cut], delta + bytes(1 + cut), b""):
        made = patched(wrong, base)
        assert made is None or made.tobytes() == new.tobytes()
        assert made is None or wrong == bytes(damaged), "a cut or longer one never passes"
