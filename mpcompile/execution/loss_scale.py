"""How the loss scale starts and moves: values with one interface, whose state is two small tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ScaleState(NamedTuple):
    """Where a loss scale is; tensors without dimensions, so that a GPU can move it without telling the host."""

    scale: Tensor
    """S, fp32, a power of two."""
    tracker: Tensor
    """Clean optimizer steps since S last changed, int64."""

    def to(self, device: torch.device) -> ScaleState:
        """The same state on ``device``."""
        return ScaleState(self.scale.to(device), self.tracker.to(device))


@dataclass(frozen=True, slots=True)
class StaticLossScale:
    """A loss scale that stays as it is; a step that overflows is skipped all the same."""

    scale: float

    def __post_init__(self) -> None:
        _require_power_of_two("loss_scale", self.scale)

    @property
    def floor(self) -> float:
        """Where S cannot fall further: it never falls."""
        return 0.0

    def initial(self) -> ScaleState:
        """The state to start from."""
        return _state(self.scale)

    def adjust(self, state: ScaleState, overflowed: Tensor, skipped: Tensor) -> ScaleState:
        """The state after an optimizer step: the same."""
        return state

    def saved(self, state: ScaleState) -> dict[str, Any]:
        """The state under ``torch.amp.GradScaler``'s keys; with factors of 1 it stays as it is there too."""
        return _saved(state, growth_factor=1.0, backoff_factor=1.0, growth_interval=2000)

    def loaded(self, saved: Mapping[str, Any]) -> tuple[StaticLossScale, ScaleState]:
        """The loss scale and state to continue with: those of the option."""
        return self, self.initial()


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """A loss scale that falls when gradients overflow and grows while they do not.

    .. code-block:: text

        overflowed:      S = max(S * backoff_factor, floor);  tracker = 0
        skipped, but not for an overflow here:                nothing changes
        otherwise:       tracker = tracker + 1
                         after growth_interval clean steps:   S = min(S * growth_factor, cap);  tracker = 0

    The defaults are those of ``torch.amp.GradScaler``; floor and cap keep S from 0 and infinity.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "growth_interval":
                _require_power_of_two(f"loss_scale[{field.name!r}]", getattr(self, field.name))
        if not self.growth_factor > 1 > self.backoff_factor:
            raise ValueError(
                "loss_scale needs growth_factor > 1 > backoff_factor, "
                f"got {self.growth_factor:g} and {self.backoff_factor:g}."
            )
        if type(self.growth_interval) is not int or self.growth_interval < 1:
            raise ValueError(f"loss_scale['growth_interval'] must be a positive int, got {self.growth_interval!r}.")
        if not self.floor <= self.init_scale <= self.cap:
            raise ValueError(
                "loss_scale needs floor <= init_scale <= cap, "
                f"got {self.floor!r} <= {self.init_scale!r} <= {self.cap!r}."
            )

    def initial(self) -> ScaleState:
        """The state to start from."""
        return _state(self.init_scale)

    def adjust(self, state: ScaleState, overflowed: Tensor, skipped: Tensor) -> ScaleState:
        """The state after an optimizer step.

        ``overflowed`` (bool, no dimensions): whether gradients scaled by this S were not finite; ``skipped``: whether
        the step was left out, for that or for another model's overflow.
        """
        scale, tracker = state
        counted = tracker + ~skipped
        grows = (counted >= self.growth_interval) & ~skipped
        grown = torch.where(grows, (scale * self.growth_factor).clamp_max(self.cap), scale)
        fallen = (scale * self.backoff_factor).clamp_min(self.floor)
        return ScaleState(
            torch.where(overflowed, fallen, grown),
            torch.where(overflowed | grows, torch.zeros_like(tracker), counted),
        )

    def saved(self, state: ScaleState) -> dict[str, Any]:
        """The state under ``torch.amp.GradScaler``'s keys."""
        return _saved(state, self.growth_factor, self.backoff_factor, self.growth_interval)

    def loaded(self, saved: Mapping[str, Any]) -> tuple[DynamicLossScale, ScaleState]:
        """The loss scale and state to continue with; floor and cap are those of the option."""
        scale = float(saved["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"A loss scale of {scale} cannot be continued; it must be positive and finite.")
        kept = min(max(power_of_two_below(scale), self.floor), self.cap)
        # A static scale saves factors of 1.
        names = ("growth_factor", "backoff_factor", "growth_interval") if saved["growth_factor"] != 1 else ()
        continued = replace(self, init_scale=kept, **{name: saved[name] for name in names})
        tracker = torch.tensor(int(saved["_growth_tracker"]), dtype=torch.int64)
        return continued, ScaleState(continued.initial().scale, tracker)


LossScale = StaticLossScale | DynamicLossScale


def parse_loss_scale(value: Any) -> LossScale | None:
    """The loss scale that the option ``loss_scale`` asks for; None where nothing is to be scaled by mixprec."""
    if value is None or value == "external":
        return None
    if isinstance(value, str) and value in ("auto", "dynamic"):
        return DynamicLossScale()
    if isinstance(value, Mapping):
        names = [field.name for field in fields(DynamicLossScale)]
        unknown = sorted(set(value) - set(names))
        if unknown:
            raise ValueError(f"Unknown key {unknown[0]!r} in option `loss_scale`. Accepted: {', '.join(names)}.")
        return DynamicLossScale(**value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StaticLossScale(float(value))
    raise ValueError(
        "Option `loss_scale` must be one of 'auto', 'dynamic', None, 'external', a power of two, or a dict of "
        f"DynamicLossScale's fields; got {value!r}."
    )


def power_of_two_below(value: float) -> float:
    """The largest power of two that is not above ``value`` (positive and finite)."""
    return 2.0 ** (math.frexp(value)[1] - 1)


def _require_power_of_two(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"Option {name} must be a positive power of two, got {value!r}.")
    below = power_of_two_below(float(value))
    if below != value:
        raise ValueError(
            f"Option {name} must be a power of two, so that scaling rounds nothing; got {value!r}, between "
            f"{below:g} and {2 * below:g}."
        )
    if not 2.0**-126 <= value <= 2.0**127:
        raise ValueError(f"Option {name} must be a number that float32 holds, got {value!r}.")


def _saved(
    state: ScaleState, growth_factor: float, backoff_factor: float, growth_interval: int
) -> dict[str, float | int]:
    return {
        "scale": float(state.scale),
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "_growth_tracker": int(state.tracker),
    }


def _state(scale: float) -> ScaleState:
    return ScaleState(torch.tensor(scale, dtype=torch.float32), torch.tensor(0, dtype=torch.int64))
