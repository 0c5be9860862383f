"""States of a loss scale and where steps take them, for the tests of loss scales."""

import torch

from mpcompile.execution.loss_scale import LossScale, ScaleState

CLEAN, OVERFLOWED, SKIPPED_FOR_ANOTHER = (False, False), (True, True), (False, True)
"""What became of a step: whether gradients of this scale overflowed, and whether the step was left out."""


def state(scale: float, tracker: int = 0) -> ScaleState:
    return ScaleState(torch.tensor(scale), torch.tensor(tracker))


def after(loss_scale: LossScale, start: ScaleState, *steps: tuple[bool, bool]) -> tuple[float, int]:
    """Scale and tracker after ``steps``."""
    for overflowed, skipped in steps:
        start = loss_scale.adjust(start, torch.tensor(overflowed), torch.tensor(skipped))
    assert start.scale.dtype is torch.float32
    assert start.tracker.dtype is torch.int64
    assert start.scale.shape == start.tracker.shape == ()
    return float(start.scale), int(start.tracker)


def sequence(loss_scale: LossScale, start: ScaleState, *steps: tuple[bool, bool]) -> list[float]:
    """The scale after each of ``steps``."""
    return [after(loss_scale, start, *steps[: count + 1])[0] for count in range(len(steps))]
