"""The policy: everything that decides precision, as one frozen, hashable value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpcompile.passes.rules import Rule, parse_rule, require_known_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which low precision type to use, and the exceptions the user asked for.

    A run of the passes is a function of (graph, policy) alone.
    """

    dtype: torch.dtype = torch.bfloat16
    """The low precision type: ``torch.bfloat16`` or ``torch.float16``; ``torch.float32`` changes nothing."""
    preset: str = "default"
    """x"""
    fp32: tuple[str, ...] = ()
    """Rules for what computes in fp32 whatever its class: ``"layers.*.norm"``, ``"op:softmax"``, ``"param:*"``."""
    low: tuple[str, ...] = ()
    """Rules for what computes in the low type whatever its class; an ``fp32`` rule wins over them."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"Policy.dtype must be torch.bfloat16, torch.float16 or torch.float32, got {self.dtype!r}."
            )
        for name in ("fp32", "low"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                raise TypeError(f"Policy.{name} must be a tuple of rules, got {value!r}.")
        contradictory = sorted(set(self.fp32) & set(self.low))
        if contradictory:
            raise ValueError(f"Rule {contradictory[0]!r} is in both `fp32` and `low`; keep one.")
        for rule in self.rules("fp32") + self.rules("low"):
            if rule.kind == "op":
                require_known_op(rule)

    def rules(self, precision: str) -> tuple[Rule, ...]:
        """The parsed rules of ``"fp32"`` or ``"low"``."""
        return tuple(parse_rule(text) for text in (self.fp32 if precision == "fp32" else self.low))

    def only_op_rules(self) -> Policy:
        """The same policy without module and parameter rules."""
        kept = {
            precision: tuple(str(rule) for rule in self.rules(precision) if rule.kind == "op")
            for precision in ("fp32", "low")
        }
        return Policy(dtype=self.dtype, preset=self.preset, fp32=kept["fp32"], low=kept["low"])

    @property
    def is_fp32(self) -> bool:
        """Whether the policy leaves every graph as it is."""
        return self.dtype is torch.float32
