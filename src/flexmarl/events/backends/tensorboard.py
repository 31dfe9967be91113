"""Sink on TensorBoard's event files: `tensorboard --logdir runs` shows every run beside the others."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """One scalar per metric, under the metric's own name. The files are written by TensorBoard's own thread."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hands the values over."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is queued; calling it twice is no error."""
        self._writer.close()
