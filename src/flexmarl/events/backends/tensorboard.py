"""Sink on TensorBoard's event files: `tensorboard --logdir runs` shows all runs in one view."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes one scalar per metric, under the metric's own name. A thread of TensorBoard writes the files."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes the values of a step to TensorBoard's writer."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out the values that are queued. A second call does nothing."""
        self._writer.close()
