"""Measure what the fp16 runtime adds to a call and to an optimizer step: ``python -m benchmarks.overhead``.

A model: a call of it under mixprec in fp16, against a call of a copy under plain Inductor in fp32. A graph: the same
compiled graph with and without the runtime around it (the loss scale handed in, the overflow flags collected). A step:
AdamW on parameters that the runtime watches, against AdamW on copies that it does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpcompile.execution import scaled_graph

CALLS = 2000


class Chain(nn.Module):
    """Linear layers in a row: [N, 4] -> a scalar. So small that a call is all host time."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def model_overhead(layers: int) -> tuple[float, float]:
    """Microseconds of a call of the model under plain Inductor, and under mixprec with its runtime."""
    x = torch.randn(2, 4)
    plain = torch.compile(Chain(layers))
    mixed = torch.compile(Chain(layers), backend="mixprec", options={"dtype": "fp16"})
    torch._dynamo.reset()  # else the second model may run the code of an earlier measurement
    plain(x), mixed(x)
    return _interleaved(lambda: plain(x), lambda: mixed(x))


def graph_overhead(layers: int) -> tuple[float, float]:
    """Microseconds of a call of the compiled graph, and of a call with the runtime."""
    model, x = Chain(layers), torch.randn(2, 4)
    graphs: list[tuple[scaled_graph.ScaledGraph, tuple[Any, ...]]] = []
    original = scaled_graph.ScaledGraph.__call__

    def watching(self: scaled_graph.ScaledGraph, *args: Any) -> Any:
        graphs.append((self, args))
        return original(self, *args)

    scaled_graph.ScaledGraph.__call__ = watching  # type: ignore[method-assign]
    torch.compile(model, backend="mixprec", options={"dtype": "fp16"})(x)
    scaled_graph.ScaledGraph.__call__ = original  # type: ignore[method-assign]
    (graph, args) = graphs[0]
    state = (torch.tensor(2.0**16), graph._probe)
    return _interleaved(lambda: graph._compiled(*args, *state), lambda: graph(*args))


def step_overhead(layers: int) -> tuple[float, float]:
    """Microseconds of an optimizer step without the runtime, and with it."""
    plain, watched = Chain(layers), Chain(layers)
    options = {"dtype": "fp16", "compiler": "aot_eager"}
    torch.compile(watched, backend="mixprec", options=options)(torch.randn(2, 4)).backward()
    plain(torch.randn(2, 4)).backward()
    first, second = (torch.optim.AdamW(model.parameters()) for model in (plain, watched))
    return _interleaved(first.step, second.step)


def _interleaved(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(CALLS):
        for function, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    medians = [statistics.median(taken) * 1e6 for taken in times]
    return medians[0], medians[1]


def main() -> None:
    """Measure both for a model of 8 and one of 200 parameters."""
    torch.set_num_threads(1)
    for layers in (4, 100):
        for what, measure in (("model", model_overhead), ("graph", graph_overhead), ("optimizer step", step_overhead)):
            without, with_runtime = measure(layers)
            added = with_runtime - without
            print(f"{2 * layers:3} parameters, {what:14}: {without:7.1f} us without, {added:+6.1f} us with the runtime")


if __name__ == "__main__":
    main()
