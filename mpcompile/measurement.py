"""Measure steps: their wall time, one beside the other, and the storages that a forward keeps for backward."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, with everything that the device was given to do finished before and after."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def interleaved(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    prepare: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> dict[str, float]:
    """Median seconds of each, one call of each per round, so that a disturbed moment hits all of them.

    Every round has another order: a call finds the caches and the allocator as the one before it left them.

    ``prepare``: what is called before, untimed, under the same names. No name is needed in it.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(work), len(work)):
            if name in prepare:
                prepare[name]()
            taken[name].append(seconds(work[name], device))
    return {name: statistics.median(values) for name, values in taken.items()}


def kept_storages(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> tuple[dict[int, int], Tensor]:
    """Address and bytes of every storage that ``forward`` keeps for backward, each once; and the loss that keeps them.

    ``known``: what was there before and does not count (parameters, buffers, inputs).
    """
    before = {_address(tensor) for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in before:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    return kept, loss


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
