"""The loss scale at which a captured graph would train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpcompile.analysis.capture import GraphCall
from mpcompile.analysis.evaluate import Values, run
from mpcompile.analysis.targets import Result, loss_scale_input, results_of
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.options import Options


def adapts(options: Mapping[str, Any] | None) -> bool:
    """Whether the loss scale of fp16 falls when gradients overflow."""
    return isinstance(Options.parse(options).scaling(torch.float16), DynamicLossScale)


def settle(call: GraphCall, draws: Values) -> tuple[Mapping[str, Any], Values]:
    """Run a graph in mixed precision, the loss scale halved until no gradient overflows, as training would.

    Returns the inputs with that scale, and the values of all nodes. Not below a scale of 1, and not where an output is
    not finite: no scale helps there.
    """
    inputs = dict(call.inputs)
    name = loss_scale_input(call.after)
    results = results_of(call.before, call.after)
    gradients = [result for result in results if result.is_gradient]
    values = run(call.after, inputs, None, draws)
    if not are_finite([result for result in results if not result.is_gradient], values):
        return inputs, values
    while name and not are_finite(gradients, values) and float(inputs[name]) > 1:
        inputs[name] = inputs[name] / 2
        values = run(call.after, inputs, None, draws)
    return inputs, values


def are_finite(results: Iterable[Result], values: Mapping[str, Any]) -> bool:
    """Whether all ``results`` are finite."""
    return all(bool(values[result.node.name].isfinite().all()) for result in results)
