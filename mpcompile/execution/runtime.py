"""The state of a model that trains in fp16: its loss scale, and what became of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpcompile.execution.loss_scale import LossScale
from mpcompile.execution.low_copies import stale_all
from mpcompile.notices import notify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SKIPS_BEFORE_WARNING = 20
"""So many skipped steps in a row are no longer the search for the right scale."""


class Runtime:
    """What ``mpcompile.runtime(compiled)`` returns: the loss scale of a compiled model and the account of its steps.

    Everything is read from small tensors on the model's device; reading waits for the device.
    """

    process_group: ProcessGroup | str | None = "world"
    """The processes that share an optimizer step and so skip it together; ``"world"``: all, where torch.distributed is
    initialised; ``None``: this process decides alone."""
    skips_before_warning: int = SKIPS_BEFORE_WARNING
    """After so many skipped steps in a row a warning names the parameters that overflow."""

    def __init__(self, loss_scale: LossScale | None, policy: str, *, strict: bool = False) -> None:
        """``loss_scale=None``: nothing is scaled (bf16, or scaling left to the user); ``policy``: its digest."""
        self._loss_scale = loss_scale
        self._policy = policy
        self._strict = strict
        self._state = None if loss_scale is None else loss_scale.initial()
        self._on_device: dict[torch.device, Tensor] = {}
        self._skipped = torch.tensor(0, dtype=torch.int64)
        self._in_a_row = torch.tensor(0, dtype=torch.int64)
        self._last = torch.tensor(False)
        self._at_floor = torch.tensor(False)
        self._names: tuple[str, ...] = ()
        self._bad: Tensor | None = None
        self._warned = self._warned_at_floor = False
        self._judged = 0
        self._nonfinite: Any = None
        self._nonfinite_at = -1

    @property
    def scale(self) -> float:
        """S, the factor on the gradients inside the graph; 1 where nothing is scaled."""
        return 1.0 if self._state is None else float(self._state.scale)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step on parameters of this model was skipped."""
        return bool(self._last)

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped so far."""
        return int(self._skipped)

    @property
    def overflowed(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients were not finite at the last optimizer step."""
        if self._bad is None:
            return ()
        return tuple(name for name, bad in zip(self._names, self._bad.tolist(), strict=True) if bad)

    @property
    def first_nonfinite(self) -> Any:
        """With option ``check``: the first value of a backward that was not finite (``mpcompile.NonFinite``), of the
        last optimizer step that had one; None where no step had."""
        return self._nonfinite

    def note_nonfinite(self, found: Any) -> bool:
        """Take note of a value that is not finite; False where one was found already since the last optimizer step.

        What other graphs then compute of it in the same backward is no finding.
        """
        if self._nonfinite_at == self._judged:
            return False
        self._nonfinite, self._nonfinite_at = found, self._judged
        return True

    def scale_on(self, device: torch.device) -> Tensor:
        """S as an input of a graph on ``device``; a new tensor when it changes, so that each backward keeps its own."""
        scale = self._on_device.get(device)
        if scale is None:
            assert self._state is not None
            scale = self._on_device[device] = self._state.scale.to(device)
        return scale

    def refresh(self) -> None:
        """With ``weight_cache=True``: make every low copy of a weight anew before it is next read.

        For writes into parameters that cannot be seen: ``parameter.data.add_(...)``, or through numpy.
        """
        stale_all()

    def judged(self, names: tuple[str, ...], bad: Tensor, overflowed: Tensor, skipped: Tensor) -> None:
        """Take note of an optimizer step, and move the scale.

        ``bad`` (bool, one for each of ``names``): whose gradients are not finite here; ``overflowed``: whether any of
        this model's are on any process; ``skipped``: whether the step is left out.
        """
        device = overflowed.device
        self._judged += 1
        self._names, self._bad, self._last = names, bad, skipped
        self._skipped = self._skipped.to(device) + skipped
        self._in_a_row = torch.where(skipped, self._in_a_row.to(device) + 1, 0)
        assert self._loss_scale is not None
        assert self._state is not None
        before = self._state.to(device)
        self._at_floor = overflowed & (before.scale <= self._loss_scale.floor)
        self._state = self._loss_scale.adjust(before, overflowed, skipped)
        self._on_device.clear()

    @property
    def is_due_to_warn(self) -> bool:
        """Whether it is time to look, where looking makes the host wait for a GPU."""
        return self._judged % self.skips_before_warning == 0

    def warn(self) -> None:
        """Warn of steps skipped in a row, and of an overflow at the scale's floor, once until a step succeeds."""
        if not self.last_step_skipped:
            self._warned = self._warned_at_floor = False
            return
        if int(self._in_a_row) >= self.skips_before_warning and not self._warned:
            self._warned = True
            self._notify(f"{int(self._in_a_row)} optimizer steps in a row were skipped, because gradients overflowed")
        if bool(self._at_floor) and not self._warned_at_floor:
            self._warned_at_floor = True
            self._notify(f"gradients overflow with the loss scale at its floor of {self.scale:g}")

    def _notify(self, what: str) -> None:
        names = ", ".join(self.overflowed[:8]) + (", ..." if len(self.overflowed) > 8 else "")
        notify(
            f"mixprec: {what}. Not finite: {names or 'gradients on another process'}. Where the forward overflows or "
            f"the loss is not finite, a loss scale below {self.scale:g} does not help: keep such modules in fp32 "
            "(options={'fp32': [...]}) or use dtype='bf16'.",
            strict=self._strict,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state to save, with ``torch.amp.GradScaler``'s keys; empty where nothing is scaled."""
        if self._loss_scale is None or self._state is None:
            return {}
        return {
            **self._loss_scale.saved(self._state),
            "skipped_steps": self.skipped_steps,
            "steps_skipped_in_a_row": int(self._in_a_row),
            "policy": self._policy,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, before or after the model is compiled; a GradScaler's state will do.

        A scale that is no power of two is rounded down to one, and kept between floor and cap; a static loss scale
        stays what the option says. A state of another policy is loaded with a warning. Raises ``KeyError`` or
        ``ValueError`` for what is no state.
        """
        if self._loss_scale is None or not state:  # a disabled GradScaler saves nothing either
            return
        continued = self._loss_scale.loaded(state)
        skipped, in_a_row = (int(state.get(key, 0)) for key in ("skipped_steps", "steps_skipped_in_a_row"))
        if state.get("policy", self._policy) != self._policy:
            notify(
                "The loaded state is of a run with another precision policy (dtype, policy, rules); its loss scale "
                "may not fit.",
                strict=self._strict,
            )
        self._loss_scale, self._state = continued
        self._skipped, self._in_a_row = torch.tensor(skipped), torch.tensor(in_a_row)
        self._on_device.clear()
