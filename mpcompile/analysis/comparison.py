"""The comparison of a mixed-precision run with fp64 and fp32, as data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeError:
    """The error of one operation. Errors are norms of differences over norms of the fp64 value."""

    name: str
    op: str
    """Operator in the graph, e.g. ``aten.addmm.default``."""
    user_op: str
    """Operator the model called, before decomposition."""
    module: str
    """Module path, from the model's root."""
    source: str
    """``file:line`` of the model's code."""
    direction: str
    """``forward`` or ``backward``."""
    graph: int
    """Which call of which graph, in order."""
    dtype: str
    """Of the (first) result."""
    error: float
    """Of mixed precision against fp64."""
    error_fp32: float
    """Of fp32 against fp64."""
    worst: float
    """Largest error of an element, over the root mean square of the fp64 value."""
    ulps: float
    """``error`` in units in the last place of the low type."""
    introduced: float
    """What the operation itself adds: mixed precision against fp64 for the same inputs."""
    inherited: float
    """What was there before: fp64 for the inputs it had, against the fp64 run."""
    amplification: float
    """How many times larger the inherited relative error is than the largest among the inputs."""
    smallest: int | None
    """Binary exponent of the smallest magnitude of the fp64 value that is not zero."""
    largest: int | None
    """Binary exponent of its largest magnitude."""
    overflow: float
    """Share of its elements beyond the low type's range."""
    subnormal: float
    """Share of its elements below the low type's smallest normal number."""
    underflow: float
    """Share of its elements, zeros apart, that the low type rounds to zero."""
    nonfinite: float
    """Share of the elements that are not finite in mixed precision and are in fp64."""
    breaks: bool
    """Whether such an element appears here although all inputs are finite."""
    contribution: float
    """Share of the error of loss and gradients that comes from roundings of this operation and of its operands, as far
    as no later operation is to blame for magnifying it."""
    amplified: float
    """Share of that error that would not be there, did this operation magnify errors at most eight times. Over all
    operations it adds up, with ``contribution``, to ``Comparison.attributed``."""
    switched: float
    """Share of that error that arises here because integers or booleans it reads (masks, indices) came out otherwise
    than in fp64. It is part of the contributions of those whose roundings moved the compared values."""

    @property
    def score(self) -> float:
        """What the ranking goes by, after ``breaks``."""
        return abs(self.contribution + self.amplified)


@dataclass(frozen=True, slots=True)
class ResultError:
    """The error of a gradient or of an output, relative to its norm in fp64."""

    name: str
    """The parameter's name, or ``output:0``."""
    graph: int
    error: float
    error_fp32: float
    size: float
    """Norm of the fp64 value."""
    cancellation: float
    """How many times smaller that is than its terms would add up to with random signs: a gradient that is zero but for
    rounding has a large one, and an ``error`` that means nothing. At least 1."""

    @property
    def effective(self) -> float:
        """The error relative to what the terms would add up to."""
        return self.error / self.cancellation


@dataclass(frozen=True, slots=True)
class ModuleError:
    """The operations of one module in one direction, rolled up."""

    module: str
    direction: str
    operations: int
    error: float
    """The largest error of one of them."""
    contribution: float
    amplified: float
    breaks: bool
    worst: str
    """Name of the operation with the highest score."""

    @property
    def score(self) -> float:
        """What the ranking goes by, after ``breaks``."""
        return abs(self.contribution + self.amplified)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one operation contributes to the error of a target."""

    name: str
    graph: int
    module: str
    source: str
    value: float
    """In the units of ``Contributions.measured``; negative where it happens to cancel other errors."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """The error of one target, shared out over operations."""

    target: str
    measured: float
    """|mixed - fp64| of the target; for ``all``, the sum of errors relative to the sizes of results."""
    total: float
    """Sum over all operations: ``measured`` to first order."""
    nodes: tuple[Contribution, ...]
    """Largest first."""


@dataclass(frozen=True)
class Comparison:
    """Fp64, fp32 and mixed-precision runs of the same graphs, node by node."""

    dtype: str
    """The low type."""
    loss_scale: float | None
    """The loss scale of the run; None where nothing is scaled."""
    nodes: tuple[NodeError, ...]
    """In the order of execution; views are left out."""
    gradients: tuple[ResultError, ...]
    outputs: tuple[ResultError, ...]
    error: float
    """Mean relative error over loss and gradients (over the outputs, where there is no backward); infinite where one of
    them is not finite."""
    attributed: float
    """Share of ``error`` that the contributions add up to; far from 1, rounding is no longer a small perturbation."""
    barriers: tuple[str, ...]
    """Operations that have no derivative, so that errors made before them are in no contribution."""
    unmeasured: tuple[str, ...] = ()
    """Operations that cannot run in fp64 (custom operators in 16 bits, loops): what they round is in no error here."""
    share_out: Callable[[str], Contributions] | None = dataclasses.field(default=None, compare=False, repr=False)
    """Shares out another target; None in a comparison that was read from JSON."""

    def worst(self, n: int = 10) -> list[NodeError]:
        """The ``n`` operations to look at first: what stops being finite, then by share of the error."""
        return sorted(self.nodes, key=_rank)[:n]

    def modules(self) -> list[ModuleError]:
        """Operations rolled up by module and direction, worst first."""
        groups: dict[tuple[str, str], list[NodeError]] = {}
        for node in self.nodes:
            groups.setdefault((node.module, node.direction), []).append(node)
        return sorted((_roll_up(*key, nodes) for key, nodes in groups.items()), key=_rank)

    def first_nonfinite(self) -> NodeError | None:
        """The first operation whose result is not finite although its inputs, and its fp64 value, are."""
        return next((node for node in self.nodes if node.breaks), None)

    def contributions(self, target: str = "all") -> Contributions:
        """Share out the error of ``target``: ``all``, ``loss``, ``output:0`` or ``grad:layers.0.weight``.

        ``loss``: outputs weighted by their gradients. ``all``: loss and gradients, each relative to its size. Raises
        ``KeyError`` for a target there is not, and ``LookupError`` after ``from_json``, where the graphs are gone.
        """
        if self.share_out is None:
            raise LookupError("A comparison read from JSON has no graphs to share errors out in; call compare() again.")
        return self.share_out(target)

    def __str__(self) -> str:
        from mpcompile.analysis.terminal import render

        return render(self)

    def plot(self, path: str | Path) -> None:
        """Draw error and contribution by depth into an image file; needs matplotlib."""
        from mpcompile.analysis.plot import draw

        draw(self, path)

    def to_json(self) -> str:
        """The comparison as JSON (without what shares out); infinite and undefined numbers are strings."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "share_out"}
        return json.dumps(_plain(data), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        data["nodes"] = tuple(_read(NodeError, node) for node in data["nodes"])
        data["gradients"] = tuple(_read(ResultError, result) for result in data["gradients"])
        data["outputs"] = tuple(_read(ResultError, result) for result in data["outputs"])
        data["barriers"] = tuple(data["barriers"])
        data["unmeasured"] = tuple(data["unmeasured"])
        return _read(cls, data)


def _rank(error: NodeError | ModuleError) -> tuple[bool, float]:
    return (not error.breaks, -error.score)


def _roll_up(module: str, direction: str, nodes: list[NodeError]) -> ModuleError:
    return ModuleError(
        module=module,
        direction=direction,
        operations=len(nodes),
        error=max(node.error for node in nodes),
        contribution=sum(node.contribution for node in nodes),
        amplified=sum(node.amplified for node in nodes),
        breaks=any(node.breaks for node in nodes),
        worst=min(nodes, key=_rank).name,
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(kind: Callable[..., _T], data: dict[str, Any]) -> _T:
    types: Iterable[Any] = dataclasses.fields(kind)  # type: ignore[arg-type]
    numbers = {f.name for f in types if str(f.type).startswith("float")}
    return kind(**{k: float(v) if k in numbers and isinstance(v, str) else v for k, v in data.items()})
