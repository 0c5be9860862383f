"""``compare``: where a model's error in mixed precision comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpcompile.analysis.attribution import (
    Attribution,
    attribute,
)
from mpcompile.analysis.capture import Batch, Loss, capture
from mpcompile.analysis.compared import Compared
from mpcompile.analysis.comparison import (
    Comparison,
    Contribution,
    Contributions,
    NodeError,
    ResultError,
)
from mpcompile.analysis.evaluate import floating, is_unseen
from mpcompile.analysis.measure import distance, in_ulps, norm, range_of, ratio, worst_element
from mpcompile.analysis.scale import adapts
from mpcompile.analysis.targets import Result, size_of
from mpcompile.notices import MixprecError
from mpcompile.passes.graph import (
    describe,
    is_backward,
    is_getitem,
    is_partial_view,
    is_tuple_view,
    is_view,
    module_path,
    op_name,
    source_line,
    user_op_name,
)


def compare(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Comparison:
    """Run ``model(*inputs, **kwargs)`` in mixed precision, fp32 and fp64, and say where the error comes from.

    One forward and, where gradients are enabled, one backward from ``loss``, a function of what the model returns;
    without it, from the output itself where that is one number, else from the mean of squares over all floating-point
    outputs. Everything happens on a copy: the model, its gradients and buffers and the random state stay as they are.
    fp16 with a loss scale that adapts is run at the largest scale, from its first one down, at which no gradient
    overflows. Every call of every captured graph is compared with the inputs it really got: what happens between
    graphs (the loss, often) is taken from the mixed run. ``options`` as for the backend; its compiler plays no part:
    operations run one by one. Needs memory for about four times all values of the graph.

    Raises what compiling with the same options raises, and ``MixprecError`` where no graph was captured or the policy
    leaves everything in fp32.
    """
    with torch.random.fork_rng():
        calls = capture(model, [Batch(inputs, kwargs)], options, loss)
        if all(call.dtype is torch.float32 for call in calls):
            raise MixprecError(
                "There is nothing to compare: the policy leaves this model in fp32. Give options={'dtype': 'bf16'}."
            )
        with torch.no_grad():
            adapting = adapts(options)
            compared = [Compared.of(call, index, adapting=adapting) for index, call in enumerate(calls)]
            return _comparison(compared, str(calls[0].dtype)[6:])


def _comparison(compared: Sequence[Compared], dtype: str) -> Comparison:
    parts = [attribute(each.runs, each.local, each.target("all"), damped=True) for each in compared]
    measured = sum(part.measured for part in parts)
    count = sum(len(each.everything) for each in compared)
    nodes = [node for each, part in zip(compared, parts, strict=True) for node in _nodes(each, part, measured)]
    results = [(result.is_gradient, error) for each in compared for result, error in _results(each)]
    scales = [each.scale for each in compared if each.scale is not None]
    return Comparison(
        dtype=dtype,
        loss_scale=min(scales) if scales else None,
        nodes=tuple(nodes),
        gradients=tuple(error for is_gradient, error in results if is_gradient),
        outputs=tuple(error for is_gradient, error in results if not is_gradient),
        error=measured / max(count, 1) if all(math.isfinite(error.error) for _, error in results) else math.inf,
        attributed=ratio(sum(map(_total, parts)), measured),
        barriers=tuple(f"{name}: {why}" for part in parts for name, why in part.barriers.items()),
        unmeasured=tuple(describe(node) for each in compared for node in each.runs.gm.graph.nodes if is_unseen(node)),
        share_out=lambda target: _share_out(compared, target),
    )


def _nodes(each: Compared, part: Attribution, measured: float) -> list[NodeError]:
    shown = [node for node in each.runs.gm.graph.nodes if node.name in each.local and not _is_form(node)]
    return [_node(node, each, part, measured) for node in shown]


def _is_form(node: fx.Node) -> bool:
    return is_view(node) or is_partial_view(node) or is_tuple_view(node) or is_getitem(node)


def _node(node: fx.Node, each: Compared, part: Attribution, measured: float) -> NodeError:
    runs, local = each.runs, each.local[node.name]
    truth, mixed, single = (_tensors(values[node.name]) for values in (runs.wide, runs.mixed, runs.single))
    size, error = norm(truth), distance(mixed, truth)
    bad = sum(int((~m.isfinite() & t.isfinite()).sum()) for m, t in zip(mixed, truth, strict=True))
    found = range_of(truth, each.low)
    return NodeError(
        name=node.name,
        op=op_name(node),
        user_op=user_op_name(node),
        module=module_path(node),
        source=source_line(node),
        direction="backward" if is_backward(node) else "forward",
        graph=each.index,
        dtype=str(mixed[0].dtype)[6:],
        error=ratio(error, size),
        error_fp32=ratio(distance(single, truth), size),
        worst=worst_element(mixed, truth),
        ulps=in_ulps(error, truth, each.low),
        introduced=ratio(_finite_norm(local.introduced), size),
        inherited=ratio(_finite_norm(_plus(local.inherited, local.switched)), size),
        amplification=local.amplification,
        smallest=found.smallest,
        largest=found.largest,
        overflow=found.overflow,
        subnormal=found.subnormal,
        underflow=found.underflow,
        nonfinite=bad / max(sum(t.numel() for t in truth), 1),
        breaks=bad > 0 and all(_is_finite(runs.mixed[source.name]) for source in node.all_input_nodes),
        contribution=ratio(part.rounding.get(node.name, 0.0), measured),
        amplified=ratio(part.magnifying.get(node.name, 0.0), measured),
        switched=ratio(part.switching.get(node.name, 0.0), measured),
    )


def _total(part: Attribution) -> float:
    return sum(sum(shares.values()) for shares in (part.rounding, part.magnifying))


def _plus(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [a if b is None or a is None else a + b for a, b in zip(first, second, strict=True)]


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in floating(value) if tensor is not None]


def _finite_norm(errors: Sequence[Tensor | None]) -> float:
    size = norm([error for error in errors if error is not None])
    return size if math.isfinite(size) else math.inf


def _is_finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value))


def _results(each: Compared) -> list[tuple[Result, ResultError]]:
    return [(result, _result(result, each)) for result in each.results]


def _result(result: Result, each: Compared) -> ResultError:
    name = result.name.removeprefix("grad:")
    truth = [each.truth[result.was.name]]
    size = norm(truth)
    if not math.isfinite(size):  # a gradient, where the mixed run's loss was not finite: what enters backward is its
        return ResultError(name, each.index, math.inf, math.inf, math.inf, 1.0)
    error, single = (distance([values[result.node.name]], truth) for values in (each.runs.mixed, each.runs.single))
    cancellation = ratio(size_of(result, each.runs.wide), size) if size else 1.0
    return ResultError(name, each.index, ratio(error, size), ratio(single, size), size, max(cancellation, 1.0))


def _share_out(compared: Sequence[Compared], target: str) -> Contributions:
    names = dict.fromkeys(result.name for each in compared for result in each.results)
    if target not in ("all", "loss", *names):
        raise KeyError(f"There is no target {target!r}; there are 'all', 'loss', {', '.join(map(repr, names))}.")
    with torch.no_grad():
        parts = [attribute(each.runs, each.local, each.target(target), damped=False) for each in compared]
    nodes = []
    for each, part in zip(compared, parts, strict=True):
        named = {node.name: node for node in each.runs.gm.graph.nodes}
        nodes += [
            Contribution(name, each.index, module_path(named[name]), source_line(named[name]), value)
            for name, value in part.rounding.items()
            if value
        ]
    nodes.sort(key=lambda node: -abs(node.value))
    return Contributions(target, sum(part.measured for part in parts), sum(node.value for node in nodes), tuple(nodes))
