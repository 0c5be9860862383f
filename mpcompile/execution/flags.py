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
        self._raised: Tensor | None = None
        self._number = -1
        """Number of the last backward that reported; of an earlier one ``_raised`` holds what still counts."""
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def belong_to(self, parameter: Tensor, watched: Watched, slot: int) -> None:
        """Say whose gradient the flag in ``slot`` speaks of."""
        self._parameters[slot] = (weakref.ref(parameter), watched)
        watched.flag_at(self, slot)

    def a_leaf(self) -> Tensor | None:
        """Any of the parameters, or None."""
        return next((leaf for reference, _ in self._parameters.values() if (leaf := reference()) is not None), None)

    def add(self, flags: Tensor, backward: int, *, accumulates: bool = True) -> None:
        """Take the flags of one backward (fp32 [slots], 1 where a gradient is not finite) and its growing number.

        ``accumulates``: whether its gradients go into ``.grad``, unlike those of ``torch.autograd.grad``.
        """
        if accumulates:
            self._note_cleared(backward)
        void = tuple(slot for slot, (_, watched) in self._parameters.items() if watched.cleared_before > self._number)
        if self._raised is None or len(void) == len(self._parameters):
            self._raised = flags.clone()  # a CUDA graph may own the memory of `flags`
        else:
            before = self._raised.index_fill(0, self._index(void), 0.0) if void else self._raised
            self._raised = torch.maximum(before, flags)
        self._number = backward

    def _note_cleared(self, backward: int) -> None:
        """Note which parameters have no gradient as ``backward`` reaches this graph: older flags of theirs are void."""
        for reference, watched in self._parameters.values():
            parameter = reference()
            if parameter is None or parameter.grad is None:
                watched.cleared_before = backward

    def raised(self, slots: Sequence[int]) -> Tensor:
        """Whether the gradients that wait in ``slots`` overflowed: bool, one for each."""
        if self._raised is None:
            return torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        raised = self._raised[self._index(tuple(slots))] > 0
        counts = [self._parameters[slot][1].cleared_before <= self._number for slot in slots]
        return raised if all(counts) else raised & torch.tensor(counts, device=self._device)

    def consume(self, slots: Sequence[int]) -> None:
        """Clear the flags of ``slots``: their parameters were stepped, or skipped."""
        if len(set(slots)) == len(self._parameters):
            self._raised = None
        elif self._raised is not None:
            self._raised = self._raised.index_fill(0, self._index(tuple(slots)), 0.0)

    def _index(self, slots: tuple[int, ...]) -> Tensor:
        if slots not in self._indices:
            self._indices[slots] = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return self._indices[slots]
