"""Compare the order of predicted traffic with that of measured times: ``python -m benchmarks.traffic_time``.

The presets and fp32, a training step of each, interleaved in one process. What is predicted is the traffic of the graph
that runs here: on a device without instructions for bf16, products are computed in fp32 on rounded operands, and the
casts that this takes are traffic as well. What traffic can tell is the time of the kernels that Inductor makes; that of
the products is their arithmetic.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture

import mpcompile
from benchmarks.accuracy import make
from benchmarks.traffic import VARIANTS, Traffic, misranked, options_of
from benchmarks.workloads import Workload, workloads
from mpcompile.joint_pass import emulates
from mpcompile.measurement import interleaved
from mpcompile.passes import Policy
from mpcompile.passes.emulation import emulate_low_products
from mpcompile.passes.saved_values import predict_partition, size
from mpcompile.passes.traffic import bytes_moved

_BOOLEAN = 100
"""Bytes that a Boolean counts as where it is stored for backward on a CPU: that takes over 20 ns
(``python -m benchmarks.masks``), in which a kernel moves more than that."""
_TIE = 0.1
"""Kernels whose times differ by less than this share are of one rank: repeated runs differ by as much."""
_ALIKE = 0.05
"""Predictions that differ by less than this share put nothing in order; such pairs are shown in a column of their own.
Chosen after measuring, wider than any share by which pairs came out in the other order."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a variant."""

    predicted: int
    """Bytes moved, and for every Boolean that is saved what its time is worth in bytes."""
    step: float
    """Median seconds of the whole step."""
    kernels: float
    """Median seconds in the kernels that Inductor made: all but products, allocation and the host."""


def timed(workload: Workload, rounds: int) -> dict[str, Timed]:
    """Measure a step under each variant."""
    torch._dynamo.reset()
    watch = _Stopwatch()
    steps: dict[str, Callable[[], None]] = {}
    kernels: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    predicted: dict[str, int] = {}
    for variant in VARIANTS:
        model, inputs = make(workload, 0, torch.device("cpu"))
        predicted[variant] = _predict(model, inputs, variant)
        compiled = torch.compile(model, backend="mixprec", options=options_of(variant))
        steps[variant] = functools.partial(_step, compiled, inputs, watch, kernels[variant])
        with watch.on_new_kernels():
            for _ in range(3):  # compile; then let caches and the allocator settle
                steps[variant]()
        kernels[variant].clear()
    seconds = interleaved(steps, rounds, torch.device("cpu"))
    return {name: Timed(predicted[name], seconds[name], statistics.median(kernels[name])) for name in VARIANTS}


class _Stopwatch:
    """Sums the seconds that are spent in generated kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_new_kernels(self) -> AbstractContextManager[Any]:
        """Time the kernels that are loaded meanwhile, whenever they run."""
        load = AsyncCompile.cpp_pybinding

        def loaded(compiler: AsyncCompile, *arguments: Any) -> Callable[..., None]:
            found = load(compiler, *arguments)
            return self._timed(found.result() if isinstance(found, CodeCacheFuture) else found)

        return mock.patch.object(AsyncCompile, "cpp_pybinding", loaded)

    def _timed(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            start = time.perf_counter()
            kernel(*arguments)
            self.seconds += time.perf_counter() - start

        return run


def _step(compiled: nn.Module, inputs: tuple[Tensor, ...], watch: _Stopwatch, kernels: list[float]) -> None:
    before = watch.seconds
    compiled(*inputs).backward()
    kernels.append(watch.seconds - before)


def _predict(model: nn.Module, inputs: tuple[Tensor, ...], variant: str) -> int:
    report = mpcompile.explain(model, *inputs, options=options_of(variant))
    graphs = [after for _, after in report.modules]
    booleans = sum(
        _saved_booleans(graph.graph) for graph in graphs
    )  # before partitioning, as products are widened after
    if variant != "fp32" and emulates(Policy(), inputs):
        for graph in graphs:
            emulate_low_products(graph, Policy())
            graph.graph.eliminate_dead_code()
    return sum(bytes_moved(graph.graph) for graph in graphs) + (_BOOLEAN - 1) * booleans


def _saved_booleans(graph: fx.Graph) -> int:
    saved = predict_partition(graph).saved
    return sum(size(node) for node in saved if node.op == "call_function" and node.meta["val"].dtype is torch.bool)


def ranking(variants: dict[str, Timed]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs whose kernels' times differ the other way than predicted, and those that were predicted to be alike."""
    pairs = misranked({name: Traffic(each.predicted, each.kernels) for name, each in variants.items()}, _TIE)
    alike = [(a, b) for a, b in pairs if _are_alike(variants[a].predicted, variants[b].predicted)]
    return [pair for pair in pairs if pair not in alike], alike


def _are_alike(first: int, second: int) -> bool:
    return abs(first - second) <= _ALIKE * max(first, second)


def _named(pairs: list[tuple[str, str]]) -> str:
    return "; ".join(f"{a}, {b}" for a, b in pairs) or "none"


def _cell(found: Timed) -> str:
    return f"{found.predicted / 1e6:.2f} / {found.kernels * 1e3:.2f} / {found.step * 1e3:.2f}"


def main() -> None:
    """Measure every workload and print predicted megabytes and measured milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic_time", description=__doc__)
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=31, help="interleaved steps per variant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    title = "MB moved as predicted / ms in generated kernels / ms of the step"
    table = Table("workload", *VARIANTS, "misranked", "predicted alike, times differ", title=title)
    for workload in workloads("cpu"):
        if workload.training and arguments.only.lower() in workload.name.lower():
            found = timed(workload, arguments.rounds)
            cells = [_cell(each) for each in found.values()]
            table.add_row(workload.name, *cells, *map(_named, ranking(found)))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
