"""The policy: everything that decides precision, as one frozen, hashable value."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mpcompile.passes import policy_text
from mpcompile.passes.rules import Rule, parse_rule, require_consistent, require_known_op

PRESETS = ("default", "accurate", "fast", "torch")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHORT = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which low precision type to use, how much to store in it, and the exceptions the user asked for.

    A run of the passes is a function of (graph, policy) alone. ``str(policy)`` is one line that ``Policy.parse`` reads
    back, ``policy.to_toml()`` a file that ``Policy.from_toml`` reads back.
    """

    dtype: torch.dtype = torch.bfloat16
    """The low precision type: ``torch.bfloat16`` or ``torch.float16``; ``torch.float32`` changes nothing."""
    preset: str = "default"
    """``"default"``; ``"accurate"`` stores a value low only where that rounds nothing more; ``"fast"`` stores more
    values low; ``"torch"`` computes in the dtypes that ``torch.autocast`` gives, and takes no rules."""
    fp32: tuple[str, ...] = ()
    """Rules for what computes in fp32 whatever its class: ``"layers.*.norm"``, ``"op:mm@wgrad"``, ``"param:*"``."""
    low: tuple[str, ...] = ()
    """Rules for what computes in the low type whatever its class; an ``fp32`` rule wins over them."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Lines for people, comments in ``to_toml``: where the rules come from. No part of what the policy is."""

    def __post_init__(self) -> None:
        if self.dtype not in _SHORT:
            raise ValueError(
                f"Policy.dtype must be torch.bfloat16, torch.float16 or torch.float32, got {self.dtype!r}."
            )
        require_preset("Policy.preset", self.preset, PRESETS)
        for name in ("fp32", "low"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                raise TypeError(f"Policy.{name} must be a tuple of rules, got {value!r}.")
        require_consistent(self.rules("fp32"), self.rules("low"))
        for rule in self.rules("fp32") + self.rules("low"):
            if rule.kind == "op":
                require_known_op(rule)
        if self.preset == "torch" and (self.fp32 or self.low):
            raise ValueError(
                f"Rule {(self.fp32 + self.low)[0]!r} contradicts preset 'torch', where torch.autocast decides. "
                "Write torch.autocast(device, enabled=False) around that part of the model, or choose another preset."
            )

    def rules(self, precision: str) -> tuple[Rule, ...]:
        """The parsed rules of ``"fp32"`` or ``"low"``."""
        return tuple(parse_rule(text) for text in (self.fp32 if precision == "fp32" else self.low))

    def only_op_rules(self) -> Policy:
        """The same policy without module and parameter rules."""
        kept = {
            precision: tuple(str(rule) for rule in self.rules(precision) if rule.kind == "op")
            for precision in ("fp32", "low")
        }
        return replace(self, fp32=kept["fp32"], low=kept["low"])

    @property
    def is_fp32(self) -> bool:
        """Whether the policy leaves every graph as it is."""
        return self.dtype is torch.float32

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits, the same for equal policies in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return policy_text.write_line(self._fields())

    def to_toml(self) -> str:
        """The policy as the text of a TOML file, the ``notes`` as comments above."""
        return policy_text.write_toml(self._fields(), self.notes)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read what ``str(policy)`` printed; ``ValueError`` names the key or value that is wrong and the accepted ones.

        >>> Policy.parse("preset=accurate,fp32=[layers.*.norm;op:softmax@dgrad]").preset
        'accurate'
        """
        where = f"Policy {text!r}"
        return cls._of(policy_text.read_line(text, where), "", where)

    @classmethod
    def from_toml(cls, source: str | Path) -> Policy:
        """Read a policy from a TOML file (a ``Path``, or a string that ends in ``.toml``) or from the text of one.

        Raises ``ValueError`` with the file, the line and the accepted keys or values, and ``FileNotFoundError``.
        """
        path = policy_text.path_of(source)
        text = str(source) if path is None else path.read_text(encoding="utf-8")
        where = "Policy" if path is None else f"Policy file {str(path)!r}"
        return cls._of(policy_text.read_toml(text, where), text, where)

    def _fields(self) -> dict[str, str | tuple[str, ...]]:
        return {"dtype": _SHORT[self.dtype], "preset": self.preset, "fp32": self.fp32, "low": self.low}

    @classmethod
    def _of(cls, fields: policy_text.Fields, text: str, where: str) -> Policy:
        """Make a policy of what was read; every error begins with ``where``, and the line that is at fault."""
        dtype = fields.pop("dtype", "bf16")
        if dtype not in _DTYPES:
            at = policy_text.line_of(text, "dtype")
            raise ValueError(f"{where}{at}: 'dtype' must be one of {', '.join(map(repr, _DTYPES))}; got {dtype!r}.")
        try:
            return cls(dtype=_DTYPES[str(dtype)], **fields)  # type: ignore[arg-type]
        except ValueError as error:
            rules = (*fields.get("fp32", ()), *fields.get("low", ()))
            named = next((rule for rule in rules if repr(rule) in str(error)), "preset")
            raise ValueError(f"{where}{policy_text.line_of(text, named)}: {error}") from error


def require_preset(what: str, value: object, accepted: tuple[str, ...], *others: str) -> None:
    """Raise ``ValueError``, with the nearest name, for a preset that is none; ``others``: what else may be there."""
    if value not in accepted:
        near = difflib.get_close_matches(str(value), accepted, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} must be one of {', '.join((*map(repr, accepted), *others))}; got {value!r}.{hint}")
