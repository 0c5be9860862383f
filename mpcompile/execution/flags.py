"""The overflow flags of one compiled graph on one model: raised by its backward, consumed by optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from mpcompile.execution.runtime import Runtime
from mpcompile.execution.watch import Watched


class Flags:
    """One flag for each differentiable input (a slot), over all backwards since its parameter was stepped.

    An optimizer consumes the flags of its own parameters. Where a backward also reached parameters of another
    optimizer, their flags age at that step: they still count if the gradient they speak of is still there, and not
    if it was cleared since (the discriminator's, after a generator's step).
    """

    def __init__(self, runtime: Runtime, slots: int, device: torch.device) -> None:
        self.runtime = runtime
        self._fresh = torch.zeros(slots, device=device)
        self._aged = torch.zeros(slots, device=device)
        self._parameters: dict[int, Watched] = {}
        self._spoken_of: dict[int, TensorWeakRef] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def belong_to(self, parameter: Watched, slot: int) -> None:
        """Say whose gradient the flag in ``slot`` speaks of."""
        self._parameters[slot] = parameter
        parameter.flag_at(self, slot)

    def add(self, flags: Tensor) -> None:
        """Take the flags of one backward: fp32 [slots], 1 where a gradient is not finite."""
        self._fresh = torch.maximum(self._fresh, flags)  # not in place: a CUDA graph may own the memory of `flags`

    def raised(self, slots: Sequence[int]) -> Tensor:
        """Whether the gradients that wait in ``slots`` overflowed: bool, one for each."""
        index = self._index(tuple(slots))
        raised = self._fresh[index] > 0
        if not self._spoken_of:
            return raised
        there = torch.tensor([self._is_there(slot) for slot in slots], device=raised.device)
        return raised | ((self._aged[index] > 0) & there)

    def consume(self, slots: Sequence[int]) -> None:
        """Clear the flags of ``slots``, whose parameters were stepped or skipped; age the others."""
        aged = torch.maximum(self._aged, self._fresh)
        aged[self._index(tuple(slots))] = 0
        self._aged, self._fresh = aged, torch.zeros_like(self._fresh)
        consumed = set(slots)
        if len(consumed) == len(self._parameters):
            self._spoken_of = {}
            return
        self._spoken_of = {
            slot: TensorWeakRef(gradient)
            for slot, parameter in self._parameters.items()
            if slot not in consumed and (gradient := parameter.gradient) is not None
        }

    def _is_there(self, slot: int) -> bool:
        reference = self._spoken_of.get(slot)
        return reference is not None and reference() is self._parameters[slot].gradient

    def _index(self, slots: tuple[int, ...]) -> Tensor:
        if slots not in self._indices:
            self._indices[slots] = torch.tensor(slots, dtype=torch.int64, device=self._fresh.device)
        return self._indices[slots]
