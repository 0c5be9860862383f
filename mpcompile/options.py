"""``torch.compile``'s ``options`` dict as one frozen, checked value."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mpcompile.execution.loss_scale import LossScale, parse_loss_scale
from mpcompile.passes.policy import PRESETS, Policy, require_preset
from mpcompile.passes.policy_text import path_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", *_DTYPES),
    "fp32_matmul": ("inherit", "ieee", "tf32"),
    "numerics": ("fast", "strict"),
    "strict": (False, True),
    "compiler": ("inductor", "aot_eager", "reference"),
    "weight_cache": (False, True),
    "check": (False, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a user can set; strings, so that they pickle and travel through trainers."""

    dtype: str = "auto"
    """``"bf16"``, ``"fp16"`` or ``"auto"``: bf16 where the device has it natively, else fp16 on CUDA, else fp32."""
    policy: str | Policy = "default"
    """``"default"``, ``"accurate"``, ``"fast"``, ``"torch"`` (autocast's dtypes), ``"fp32"`` (change nothing), or a
    ``mpcompile.Policy``; ``Options.parse`` reads the path of a TOML file as well."""
    fp32: tuple[str, ...] = ()
    """Rules for what stays in fp32: ``"layers.*.norm"``, ``"op:softmax"``, ``"param:*.bias"``."""
    low: tuple[str, ...] = ()
    """Rules for what computes low whatever its class; an ``fp32`` rule wins."""
    loss_scale: str | float | Mapping[str, Any] | None = "auto"
    """For fp16: ``"auto"`` or ``"dynamic"``, scaled inside the graph by a factor that adapts, or a dict of its settings
    (the fields of ``DynamicLossScale``); a power of two, scaled by that; ``"external"``, the training loop scales the
    loss itself with ``torch.amp.GradScaler``; ``None``, no scaling. bf16 needs none."""
    fp32_matmul: str = "inherit"
    """What an fp32 matmul means: the process's setting, ``"ieee"``, or ``"tf32"``."""
    numerics: str = "fast"
    """``"fast"``: a kernel may keep more precision inside; ``"strict"``: every cast rounds."""
    strict: bool = False
    """Raise where the default warns."""
    compiler: str = "inductor"
    """``"inductor"``; ``"aot_eager"`` (no code generation); ``"reference"`` (node by node, no recomputation)."""
    weight_cache: bool = False
    """Keep a low copy of every weight between calls, in place of rounding it in each call."""
    check: bool = False
    """Run operation by operation, whatever the ``compiler``, and name the first value that is not finite."""
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of ``torch._inductor.config`` for this model."""

    def __post_init__(self) -> None:
        for name, accepted in _ACCEPTED.items():
            _require_accepted(name, getattr(self, name), accepted)
        if not isinstance(self.policy, Policy):
            require_preset("Option `policy`", self.policy, (*PRESETS, "fp32"), "a mpcompile.Policy, a .toml file")
        parse_loss_scale(self.loss_scale)  # raises for what is none
        self._refuse_contradictions()
        self.resolve_policy(torch.bfloat16)  # raises for a rule that is no rule, or does not go with the preset

    def _refuse_contradictions(self) -> None:
        if isinstance(self.policy, Policy) and (self.dtype != "auto" or self.fp32 or self.low):
            raise ValueError(
                "A Policy holds its own dtype and rules; give either options `dtype`, `fp32` and `low` or a Policy."
            )
        if self.policy == "fp32" and (self.dtype != "auto" or self.low):
            raise ValueError("policy='fp32' changes nothing; it contradicts options `dtype` and `low`.")
        low = self.policy.dtype if isinstance(self.policy, Policy) else _DTYPES.get(self.dtype)
        if self.loss_scale not in ("auto", None) and (low in (torch.bfloat16, torch.float32) or self.policy == "fp32"):
            raise ValueError(f"loss_scale={self.loss_scale!r} is for dtype='fp16'; bf16 and fp32 need no loss scale.")
        if self.inductor and self.compiler != "inductor":
            raise ValueError(f"Option `inductor` needs compiler='inductor', got compiler={self.compiler!r}.")
        if self.inductor and self.check:
            raise ValueError("check=True runs operations one by one; it contradicts option `inductor`.")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Check ``torch.compile(options=...)``; ``ValueError`` names the bad key or value and the accepted ones."""
        given = dict(given or {})
        names = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"Unknown option {key!r} for backend 'mixprec'.{hint} Accepted: {', '.join(names)}.")
        for key in ("fp32", "low"):
            given[key] = _rules(key, given.get(key, ()))
        if not isinstance(given.get("inductor", {}), Mapping):
            raise TypeError(f"Option `inductor` must be a dict, got {given['inductor']!r}.")
        given["inductor"] = MappingProxyType(dict(given.get("inductor", {})))
        if isinstance(given.get("loss_scale"), Mapping):
            given["loss_scale"] = dict(given["loss_scale"])
        if isinstance(given.get("policy"), (str, Path)) and (path := path_of(given["policy"])):
            given["policy"] = Policy.from_toml(path)
        return cls(**given)

    def resolve_policy(self, automatic: torch.dtype) -> Policy:
        """The policy for a device whose automatic dtype is ``automatic``."""
        if isinstance(self.policy, Policy):
            return self.policy
        if self.policy == "fp32":
            return Policy(dtype=torch.float32, fp32=self.fp32)
        dtype = _DTYPES.get(self.dtype, automatic)
        return Policy(dtype=dtype, preset=self.policy, fp32=self.fp32, low=self.low)

    def scaling(self, low: torch.dtype) -> LossScale | None:
        """The loss scale to put into graphs whose low type is ``low``; None where nothing is to be scaled."""
        return parse_loss_scale(self.loss_scale) if low is torch.float16 else None

    def key(self) -> tuple[str, ...]:
        """The options that change generated code, for the compile cache key."""
        return (self.fp32_matmul, self.numerics, self.compiler)


def _rules(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(rule, str) for rule in value):
        raise TypeError(f"Option `{key}` must be a list of strings, got {value!r}.")
    return tuple(value)


def _require_accepted(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in accepted):
        choices = ", ".join(map(repr, accepted))
        raise ValueError(f"Option `{name}` must be one of {choices}; got {value!r}.")
