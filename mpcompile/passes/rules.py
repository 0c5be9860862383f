"""The rules a user writes: ``"layers.*.norm"``, ``"op:softmax"``, ``"param:*.bias"``.

Owns their grammar, what they match, and the error for one that can match nothing. What a match means is
decided where the rules are applied: ``intent`` before autograd, ``compute_plan`` on ATen graphs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern with its kind: ``module`` (the default), ``op`` or ``param``."""

    kind: str
    pattern: str

    def __str__(self) -> str:
        return self.pattern if self.kind == "module" else f"{self.kind}:{self.pattern}"

    def matches(self, name: str) -> bool:
        """Whether the rule covers ``name``; a module rule covers everything inside the module as well."""
        if self.kind != "module":
            return fnmatchcase(name, self.pattern)
        parts = name.split(".") if name else []
        return any(fnmatchcase(".".join(parts[:depth]), self.pattern) for depth in range(1, len(parts) + 1))


def parse_rule(text: str) -> Rule:
    """Parse one rule; raises ``ValueError`` or ``TypeError`` with the accepted forms."""
    if not isinstance(text, str):
        raise TypeError(f"A rule must be a string, got {text!r} ({type(text).__name__}).")
    kind, colon, pattern = text.partition(":")
    if not colon:
        kind, pattern = "module", text
    if kind not in ("module", "op", "param") or not pattern.strip():
        raise ValueError(
            f"Rule {text!r} is not understood; write a module path such as 'layers.*.norm', "
            "an operator as 'op:softmax', or a parameter as 'param:*.bias'."
        )
    return Rule(kind, pattern.strip())


def op_names(packet: str) -> set[str]:
    """The names under which a rule finds an operator: ``_softmax`` is found as ``softmax`` too."""
    short = packet.lstrip("_")
    names = {packet, short, short.removeprefix("native_"), packet.split("::")[-1]}
    for ending in ("_backward_data", "_backward"):
        names |= {name.removesuffix(ending) for name in tuple(names)}
    if "scaled_dot_product" in packet:
        names.add("scaled_dot_product_attention")
    return names


def require_known_op(rule: Rule) -> None:
    """Raise ``ValueError`` where ``op:NAME`` names no operator of torch and no registered custom operator."""
    if any(char in rule.pattern for char in "*?[") or _is_operator(rule.pattern):
        return
    known = [name for name in dir(torch.ops.aten) if not name.startswith("__")]
    raise ValueError(_nothing(rule, "operator", known + dir(torch.nn.functional)))


def _is_operator(name: str) -> bool:
    if "::" in name:
        namespace, _, op = name.partition("::")
        return hasattr(getattr(torch.ops, namespace), op)
    homes = (torch.ops.aten, torch.nn.functional, torch, torch.Tensor)
    return any(hasattr(home, spelled) for home in homes for spelled in (name, f"_{name}"))


def require_match(rule: Rule, names: Iterable[str]) -> None:
    """Raise ``ValueError``, with the nearest names there are, where ``rule`` matches none of ``names``."""
    names = sorted(set(names) - {""})
    if not any(rule.matches(name) for name in names):
        noun = {"module": "module", "param": "parameter", "op": "operator"}[rule.kind]
        raise ValueError(_nothing(rule, noun, names))


def _nothing(rule: Rule, noun: str, names: list[str]) -> str:
    near = difflib.get_close_matches(rule.pattern, names, n=4, cutoff=0.4) or names[:4]
    nearest = ", ".join(map(repr, near)) if near else "none there are"
    return f"Rule {str(rule)!r} matches no {noun}; the nearest names are: {nearest}."
