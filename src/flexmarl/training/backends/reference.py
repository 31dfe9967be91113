"""Reference policy in the trainer's process: the initial weights of the run, which never change."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Protocol

from transformers import PreTrainedModel


class Reference(Protocol):
    """Gives the reference policy for the length of a block, in which nothing may be trained."""

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """A model that computes what the initial weights would."""
        ...


class FrozenCopy:
    """A second copy of the weights, as they are when it is made: before a checkpoint is loaded over them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes the memory of the weights once more, and no gradients or optimiser state."""
        self._copy = deepcopy(model).requires_grad_(False)

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The copy."""
        yield self._copy
