"""Compare the order of predicted traffic with that of measured times: ``python -m benchmarks.traffic_time``.

The presets and fp32, a training step of each, interleaved in one process. What is predicted is the traffic of the two
graphs that run here: on a device without instructions for bf16, products are computed in fp32 on rounded operands, and
the casts that this takes are traffic as well. It is given as time, by what a byte takes here and what roundings and
saved masks take besides (``benchmarks.kernel_costs``, measured first). What traffic can tell is the time of the kernels
that Inductor makes; that of the products is their arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._inductor import config

from benchmarks.accuracy import make
from benchmarks.kernel_costs import Costs
from benchmarks.stopwatch import Stopwatch
from benchmarks.traffic import VARIANTS, Traffic, misranked, options_of
from benchmarks.workloads import Workload, workloads
from mpcompile.measurement import interleaved

_TIE = 0.05
"""Kernels whose times differ by less than this share are of one rank: the same ones, compiled twice, differ by as much
(the MLP's under ``default`` and ``fast``)."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a variant."""

    predicted: float
    """Seconds in the kernels that Inductor made, from what they move; what else they compute takes longer."""
    step: float
    """Median seconds of the whole step."""
    kernels: float
    """Median seconds in the kernels that Inductor made: all but products, allocation and the host."""


def timed(workload: Workload, rounds: int, costs: Costs) -> dict[str, Timed]:
    """Predict and measure a step under each variant."""
    torch._dynamo.reset()
    watch = Stopwatch()
    steps: dict[str, Callable[[], None]] = {}
    kernels: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    predicted: dict[str, float] = {}
    for variant in VARIANTS:
        model, inputs = make(workload, 0, torch.device("cpu"))
        compiled = torch.compile(model, backend="mixprec", options=options_of(variant))
        steps[variant] = functools.partial(_step, compiled, inputs, watch, kernels[variant])
        with _predicting(costs) as parts, watch.on_new_kernels():
            for _ in range(3):  # compile; then let caches and the allocator settle
                steps[variant]()
        predicted[variant] = sum(parts)
        kernels[variant].clear()
    seconds = interleaved(steps, rounds, torch.device("cpu"))
    return {name: Timed(predicted[name], seconds[name], statistics.median(kernels[name])) for name in VARIANTS}


@contextlib.contextmanager
def _predicting(costs: Costs) -> Iterator[list[float]]:
    """Collect the predictions of the graphs, forward and backward, that Inductor compiles meanwhile."""
    parts: list[float] = []

    def predict(graph: fx.Graph) -> None:
        parts.append(costs.seconds(graph))

    with (
        config.patch(post_grad_custom_post_pass=predict, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield parts


def _step(compiled: nn.Module, inputs: tuple[Tensor, ...], watch: Stopwatch, kernels: list[float]) -> None:
    kernels.append(watch.during(lambda: compiled(*inputs).backward()))


def ranking(variants: dict[str, Timed]) -> list[tuple[str, str]]:
    """Pairs whose kernels' times differ, and the other way than predicted."""
    return misranked({name: Traffic(each.predicted, each.kernels) for name, each in variants.items()}, _TIE)


def _cell(found: Timed) -> str:
    return " / ".join(f"{seconds * 1e3:.2f}" for seconds in (found.predicted, found.kernels, found.step))


def main() -> None:
    """Measure every workload and print predicted and measured milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic_time", description=__doc__)
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=31, help="interleaved steps per variant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = Costs.measure()
    title = "ms in generated kernels as predicted / as measured / ms of the step"
    table = Table("workload", *VARIANTS, "misranked", title=title, caption=str(costs))
    for workload in workloads("cpu"):
        if workload.training and arguments.only.lower() in workload.name.lower():
            found = timed(workload, arguments.rounds, costs)
            wrong = "; ".join(f"{a}, {b}" for a, b in ranking(found))
            table.add_row(workload.name, *map(_cell, found.values()), wrong or "none")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
