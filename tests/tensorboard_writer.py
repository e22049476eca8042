"""Stands in for `torch.utils.tensorboard.SummaryWriter`."""

from __future__ import annotations


class Written:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.texts: list[tuple[str, str, int]] = []
        self.is_closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append((tag, text_string, global_step))

    def close(self) -> None:
        self.is_closed = True
