"""Measure a step: its wall time, and the storages that a forward keeps for backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
