"""A run's figures in the programs that people watch them with: TensorBoard, where the recipe asks for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """The same numbers as TensorBoard's events, from a step on: what an earlier attempt wrote after it is hidden."""

    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise ImportError("run.tensorboard needs tensorboard: pip install 'tilestack[tensorboard]'") from missing
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()
