"""First-order attribution: how much of the error of a result each operation introduced.

Let y be a result of the graph, e the error of its mixed-precision value, d = e / |e|. An operation whose own error,
for the inputs it was given, is r changes <d, y> by <d<d, y> / dv, r> to first order, v being its value. Over all
operations that sums up to |e| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mpcompile.analysis.adjoint import Cotangent, Cotangents, passes_through, pull_back, total
from mpcompile.analysis.evaluate import arguments_from, evaluate, floating, is_random, widened
from mpcompile.analysis.measure import distance, norm, ratio
from mpcompile.analysis.runs import Runs
from mpcompile.analysis.switches import came_out_otherwise, compared_values
from mpcompile.analysis.targets import Result, size_of
from mpcompile.passes.graph import LOW_DTYPES, dtype_of, is_cast, packet_name
from mpcompile.passes.op_classes import OpClass, classify

TOLERATED = 8.0
"""An operation may magnify a relative error by so much before that counts as its own doing: three bits."""


@dataclass(slots=True)
class Local:
    """What one operation does to the error, by its own inputs alone."""

    introduced: list[Tensor | None]
    """Its result in mixed precision less its result in fp64 for the same inputs: its own rounding."""
    switched: list[Tensor | None]
    """Its result in fp64 for the inputs it had less the one for the integers and booleans of the fp64 run: a comparison
    or a maximum upstream came out otherwise."""
    switches: tuple[fx.Node, ...]
    """The inputs that came out otherwise."""
    inherited: list[Tensor | None]
    """The latter less its result in the fp64 run: what the errors of its floating-point inputs become."""
    amplification: float
    """Relative size of the inherited error over the largest relative error among its inputs."""

    @property
    def damping(self) -> float:
        """The factor by which the inherited error is more than ``TOLERATED`` allows, inverted; 1 where it is not."""
        return min(1.0, TOLERATED / self.amplification) if self.amplification else 1.0


@dataclass(slots=True)
class Attribution:
    """Contributions to the error of one target; of several graphs, added up."""

    measured: float = 0.0
    """|e|, over all results of the target; relative to their sizes where the target is everything."""
    rounding: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By the name of the node that is responsible: what it, and the roundings of what it reads, contribute."""
    switching: dict[str, float] = field(default_factory=dict)
    """What of it arises because integers and booleans came out otherwise, by the name of the node that reads them."""
    magnifying: dict[str, float] = field(default_factory=dict)
    """Where damped: what of the error passes through each node and would not, did it magnify by ``TOLERATED``."""
    barriers: dict[str, str] = field(default_factory=dict)
    """Operations without a derivative: errors made before them are not counted."""


def local_errors(runs: Runs) -> dict[str, Local]:
    """What every operation of a graph does to the error."""
    found = {}
    for node in runs.gm.graph.nodes:
        if node.op == "call_function" and not is_random(node) and any(v is not None for v in _of(runs.wide, node)):
            found[node.name] = _local(node, runs)
    return found


def _of(values: Mapping[str, object], node: fx.Node) -> list[Tensor | None]:
    return floating(values[node.name])


def _local(node: fx.Node, runs: Runs) -> Local:
    given = {source.name: widened(runs.mixed[source.name], torch.float64) for source in node.all_input_nodes}
    here = floating(evaluate(node, *arguments_from(node, given), torch.float64))
    switches = [source for source in node.all_input_nodes if came_out_otherwise(source, runs)]
    unswitched = here
    if switches:
        given.update({source.name: runs.wide[source.name] for source in switches})
        unswitched = floating(evaluate(node, *arguments_from(node, given), torch.float64))
    truth = _of(runs.wide, node)
    mixed = floating(widened(runs.mixed[node.name], torch.float64))
    inherited = _minus(unswitched, truth)
    switch: list[Tensor | None] = _minus(here, unswitched) if switches else [None] * len(here)
    return Local(_minus(mixed, here), switch, tuple(switches), inherited, _amplification(node, inherited, runs))


def _minus(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [a - b if a is not None and b is not None else None for a, b in zip(first, second, strict=False)]


def _amplification(node: fx.Node, inherited: list[Tensor | None], runs: Runs) -> float:
    error = ratio(_norm(inherited), _norm(_of(runs.wide, node)))
    largest = max((_error_before(source, runs) for source in node.all_input_nodes), default=0.0)
    # Of errors without a size none is said to be magnified: the first of them is named as what is not finite.
    return ratio(error, largest) if error and math.isfinite(error) and math.isfinite(largest) else 0.0


def _norm(values: Sequence[Tensor | None]) -> float:
    return norm([value for value in values if value is not None])


def _error_before(node: fx.Node, runs: Runs) -> float:
    """The relative error of a value, or that of what exact numbers were added to or taken from to make it.

    Adding a large number hides an error, and taking it away again only brings it back.
    """
    largest = _relative_error(node, runs)
    while node.op == "call_function" and packet_name(node.target) in ("add", "sub"):
        sources = [source for source in node.all_input_nodes if _relative_error(source, runs)]
        if len(sources) != 1:
            break
        (node,) = sources
        largest = max(largest, _relative_error(node, runs))
    return largest


def _relative_error(node: fx.Node, runs: Runs) -> float:
    truth = [v for v in _of(runs.wide, node) if v is not None]
    size = norm(truth)
    mixed = [v for v in floating(widened(runs.mixed[node.name], torch.float64)) if v is not None]
    return ratio(distance(mixed, truth), size) if size else 0.0


@dataclass(slots=True)
class Target:
    """What is differentiated, <d, y>, and the error that is shared out."""

    seeds: dict[fx.Node, Tensor]
    """d, for each result that counts."""
    measured: float


def errors_of(runs: Runs, results: Sequence[Result], *, relative: bool) -> Target:
    """The errors of ``results``, added up; ``relative``: each relative to the result's size.

    A result that is not finite in mixed precision has no error that could be shared out, and is left out.
    """
    target = Target({}, 0.0)
    for result in results:
        error = runs.mixed[result.node.name].double() - runs.wide[result.node.name]
        size = float(error.norm())
        if size and error.isfinite().all():
            weight = 1 / (size_of(result, runs.wide) or size) if relative else 1.0
            _seed(target.seeds, result.node, error * (weight / size))
            target.measured += size * weight
    return target


def error_of_loss(runs: Runs, results: Sequence[Result]) -> Target:
    """The error of the loss: of the outputs, weighted by the loss's gradients with respect to them."""
    found = [result for result in results if result.tangent]
    error = 0.0
    for result in found:
        difference = runs.mixed[result.node.name].double() - runs.wide[result.node.name]
        error += float((difference * runs.wide[result.tangent]).sum())
    target = Target({}, abs(error))
    for result in found:
        _seed(target.seeds, result.node, runs.wide[result.tangent] * (-1.0 if error < 0 else 1.0))
    return target


def _seed(seeds: dict[fx.Node, Tensor], node: fx.Node, seed: Tensor) -> None:
    seeds[node] = seeds[node] + seed if node in seeds else seed


def attribute(runs: Runs, local: Mapping[str, Local], target: Target, *, damped: bool) -> Attribution:
    """Contributions of all operations to the error of ``target``.

    ``damped``: where an operation magnifies an error by more than ``TOLERATED``, the rest is its own contribution, and
    of those whose error it magnified no longer; the sum stays the same.
    """
    found = Attribution(target.measured)
    nodes = {node.name: node for node in runs.gm.graph.nodes}
    damping = {name: each.damping for name, each in local.items() if each.damping < 1} if damped else {}
    seeds = dict(target.seeds)
    for node, cotangents in pull_back(runs.gm, runs.wide, seeds, damping, found.barriers):
        if node.name in local:
            _credit(node, cotangents, local[node.name], nodes, found)
            if local[node.name].switches:
                _pass_on(node, found.switching[node.name], local[node.name].switches, runs, seeds)
            excess = 1 - damping.get(node.name, 1.0)
            if excess:
                found.magnifying[node.name] = excess * _product(total(cotangents), local[node.name].inherited)
    return found


def _credit(
    node: fx.Node, cotangents: Cotangents, local: Local, nodes: Mapping[str, fx.Node], found: Attribution
) -> None:
    if local.switches:
        found.switching[node.name] = _product(total(cotangents), local.switched)
    for reader, cotangent in cotangents.items():
        found.rounding[_responsible(node, reader, nodes)] += _product(cotangent, local.introduced)


def _pass_on(
    node: fx.Node, contribution: float, switches: tuple[fx.Node, ...], runs: Runs, seeds: dict[fx.Node, Tensor]
) -> None:
    """Let those answer for a switch whose errors moved a compared value across: by the secant, jump over error.

    A mask that flips has no derivative, but the value it was compared by has an error e; a cotangent c at that value
    with <c, e> = ``contribution``, along e where the mask flipped, shares the jump out like any other error.
    """
    found = list(compared_values(switches, runs))
    for value, crossed in found:
        _seed(seeds, value, crossed * (contribution / len(found) / float(crossed.square().sum())))


def _responsible(node: fx.Node, reader: str, nodes: Mapping[str, fx.Node]) -> str:
    """Who caused a rounding: of an operand, the matmul that asked for it; of a value stored low, its producer."""
    if not (is_cast(node) and dtype_of(node) in LOW_DTYPES):
        return node.name
    if reader in nodes and classify(nodes[reader].target) is OpClass.LOW:
        return reader
    source = node.all_input_nodes[0]
    while passes_through(source):
        source = source.all_input_nodes[0]
    return source.name if source.op == "call_function" else node.name


def _product(cotangent: Cotangent, error: Sequence[Tensor | None]) -> float:
    pairs = zip(cotangent, error, strict=False)
    products = [float((a * b).sum()) for a, b in pairs if a is not None and b is not None]
    return sum(value for value in products if value == value)  # what is not finite is no number to share out
