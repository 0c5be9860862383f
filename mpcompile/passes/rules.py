"""The rules a user writes: ``"layers.*.norm"``, ``"op:softmax"``, ``"param:*.bias"``, each with ``@phase`` or without.

Owns their grammar, what they match, and the error for one that can match nothing. What a match means is
decided where the rules are applied: ``intent`` before autograd, ``compute_plan`` on ATen graphs.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

_BACKWARD = frozenset(("dgrad", "wgrad"))
PHASES = {
    "forward": frozenset(("forward",)),
    "dgrad": frozenset(("dgrad",)),
    "wgrad": frozenset(("wgrad",)),
    "backward": _BACKWARD,
    "": _BACKWARD | {"forward"},
}
"""What a rule may end with after ``@``, and the roles (see ``gradient_role``) that it then covers; without, all."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern with its kind, ``module`` (the default), ``op`` or ``param``, and the phase it is for."""

    kind: str
    pattern: str
    phase: str = ""

    def __str__(self) -> str:
        kind = "" if self.kind == "module" else f"{self.kind}:"
        phase = f"@{self.phase}" if self.phase else ""
        return f"{kind}{self.pattern}{phase}"

    def covers(self, roles: Collection[str]) -> bool:
        """Whether the rule is for an operation that has one of ``roles``."""
        return not PHASES[self.phase].isdisjoint(roles)

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
    unphased, at, phase = text.rpartition("@")
    kind, colon, pattern = (unphased if at else text).partition(":")
    if not colon:
        kind, pattern = "module", kind
    phase, known = phase.strip() if at else "", [name for name in PHASES if name]
    if kind not in ("module", "op", "param") or not pattern.strip() or not text.isprintable():
        raise ValueError(
            f"Rule {text!r} is not understood; write a module path such as 'layers.*.norm', "
            "an operator as 'op:softmax', or a parameter as 'param:*.bias'."
        )
    if at and phase not in known:
        near = difflib.get_close_matches(phase, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"Rule {text!r} ends with no phase: {hint}After '@' there may be {', '.join(known)}.")
    return Rule(kind, pattern.strip(), phase)


def require_consistent(fp32: Sequence[Rule], low: Sequence[Rule]) -> None:
    """Raise ``ValueError`` where two rules ask for fp32 and for the low type, for the same names in the same phase."""
    for first in fp32:
        for second in low:
            same = (first.kind, first.pattern) == (second.kind, second.pattern)
            both = PHASES[first.phase] & PHASES[second.phase]
            if first == second:
                raise ValueError(f"Rule {str(first)!r} is in both `fp32` and `low`; keep one.")
            if same and both:
                raise ValueError(
                    f"Rule {str(first)!r} in `fp32` and {str(second)!r} in `low` are both for "
                    f"{' and '.join(sorted(both))}; give each phases of its own."
                )


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
