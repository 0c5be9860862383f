"""Wall time of work that may run on a GPU, interleaved between those who are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpcompile.measurement import seconds


def interleaved(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    prepare: Mapping[str, Callable[[], Any]],
) -> dict[str, float]:
    """Median seconds of each, one call of each per round, so that a disturbed moment hits all of them.

    ``prepare``: what is called before, untimed, under the same names. No name is needed in it.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, function in work.items():
            if name in prepare:
                prepare[name]()
            taken[name].append(seconds(function, device))
    return {name: statistics.median(values) for name, values in taken.items()}
