"""The overflow flags of one compiled graph on one model: raised by its backward, consumed by optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mpcompile.execution.runtime import Runtime
from mpcompile.execution.watch import Watched


class Flags:
    """One flag for each differentiable input (a slot), over all backwards whose gradients wait in ``.grad``.

    A flag counts until the optimizer of its parameter steps, or until a backward finds that ``.grad`` was set to
    None: the gradient it speaks of was thrown away (that of a bad batch; the discriminator's, after a generator's
    backward went through it). A gradient zeroed in place does not show, and its flag counts.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.runtime = runtime
        self._device = device
        self._parameters: dict[int, tuple[weakref.ref[Tensor], Watched]] = {}
        self._raised: list[tuple[int, Tensor]] = []
        """Number of a backward and its flags, oldest first; one for several that nothing was cleared between."""
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def belong_to(self, parameter: Tensor, watched: Watched, slot: int) -> None:
        """Say whose gradient the flag in ``slot`` speaks of."""
        self._parameters[slot] = (weakref.ref(parameter), watched)
        watched.flag_at(self, slot)

    def add(self, flags: Tensor, backward: int) -> None:
        """Take the flags of one backward (fp32 [slots], 1 where a gradient is not finite) and its growing number."""
        cleared = self._note_cleared(backward)
        if cleared == len(self._parameters) and not (self._raised and self._raised[-1][0] == backward):
            self._raised = [(backward, flags.clone())]  # a CUDA graph may own the memory of `flags`
        elif self._raised and (cleared == 0 or self._raised[-1][0] == backward):
            number, before = self._raised[-1]
            self._raised[-1] = (number, torch.maximum(before, flags))
        else:
            self._raised.append((backward, flags.clone()))

    def _note_cleared(self, backward: int) -> int:
        """How many parameters have no gradient as ``backward`` reaches this graph: older flags of theirs are void."""
        cleared = 0
        for reference, watched in self._parameters.values():
            parameter = reference()
            if parameter is None or parameter.grad is None:
                watched.cleared_before = backward
                cleared += 1
        return cleared

    def raised(self, slots: Sequence[int]) -> Tensor:
        """Whether the gradients that wait in ``slots`` overflowed: bool, one for each."""
        index = self._index(tuple(slots))
        result = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        for backward, flags in self._raised:
            counts = [self._parameters[slot][1].cleared_before <= backward for slot in slots]
            if all(counts):
                result = result | (flags[index] > 0)
            elif any(counts):
                result = result | ((flags[index] > 0) & torch.tensor(counts, device=self._device))
        return result

    def consume(self, slots: Sequence[int]) -> None:
        """Clear the flags of ``slots``: their parameters were stepped, or skipped."""
        if len(set(slots)) == len(self._parameters):
            self._raised = []
            return
        index = self._index(tuple(slots))
        self._raised = [(backward, flags.index_fill(0, index, 0.0)) for backward, flags in self._raised]

    def _index(self, slots: tuple[int, ...]) -> Tensor:
        if slots not in self._indices:
            self._indices[slots] = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return self._indices[slots]
