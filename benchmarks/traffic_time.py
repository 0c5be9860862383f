"""Compare the order of predicted traffic with that of measured times: ``python -m benchmarks.traffic_time``.

The presets and fp32, a training step of each, interleaved in one process. What is predicted is the traffic of the graph
that runs here: on a device without instructions for bf16, products are computed in fp32 on rounded operands, and the
casts that this takes are traffic as well. Products take the same time in all variants there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mpcompile
from benchmarks.accuracy import make
from benchmarks.traffic import VARIANTS, Traffic, misranked, options_of
from benchmarks.workloads import Workload, workloads
from mpcompile.joint_pass import emulates
from mpcompile.measurement import interleaved
from mpcompile.passes import Policy
from mpcompile.passes.emulation import emulate_low_products
from mpcompile.passes.traffic import bytes_moved

_TIE = 0.05
"""Steps whose medians differ by less than this share are of one rank: repeated runs differ by as much."""


def timed(workload: Workload, rounds: int) -> dict[str, Traffic]:
    """The predicted bytes of a step under each variant, and its median seconds."""
    torch._dynamo.reset()
    steps: dict[str, Callable[[], Any]] = {}
    predicted: dict[str, int] = {}
    for variant in VARIANTS:
        model, inputs = make(workload, 0, torch.device("cpu"))
        predicted[variant] = _predict(model, inputs, variant)
        compiled = torch.compile(model, backend="mixprec", options=options_of(variant))
        steps[variant] = lambda compiled=compiled, inputs=inputs: compiled(*inputs).backward()
        for _ in range(3):  # compile; then let caches and the allocator settle
            steps[variant]()
    seconds = interleaved(steps, rounds, torch.device("cpu"))
    return {variant: Traffic(predicted[variant], seconds[variant]) for variant in VARIANTS}


def _predict(model: nn.Module, inputs: tuple[Tensor, ...], variant: str) -> int:
    report = mpcompile.explain(model, *inputs, options=options_of(variant))
    graphs = [after for _, after in report.modules]
    if variant != "fp32" and emulates(Policy(), inputs):
        for graph in graphs:
            emulate_low_products(graph, Policy())
            graph.graph.eliminate_dead_code()
    return sum(bytes_moved(graph.graph) for graph in graphs)


def main() -> None:
    """Measure every workload and print predicted megabytes and measured milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic_time", description=__doc__)
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=31, help="interleaved steps per variant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("workload", *VARIANTS, "misranked", title="One step: MB moved as predicted / ms as measured")
    for workload in workloads("cpu"):
        if workload.training and arguments.only.lower() in workload.name.lower():
            found = timed(workload, arguments.rounds)
            cells = [f"{each.predicted / 1e6:.2f} / {each.found * 1e3:.2f}" for each in found.values()]
            wrong = ", ".join(f"{a} and {b}" for a, b in misranked(found, _TIE))
            table.add_row(workload.name, *cells, wrong or "none")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
