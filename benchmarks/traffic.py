"""Compare the bytes that ``passes.traffic`` predicts with those Inductor counts: ``python -m benchmarks.traffic``.

For each workload in training, the presets and fp32, as on a device with instructions for bf16: Inductor schedules its
kernels and counts what they read and write; none of them is compiled or run for its results.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile

import mpcompile
from benchmarks.accuracy import make
from benchmarks.workloads import Workload, workloads
from mpcompile import joint_pass
from mpcompile.passes.traffic import bytes_moved

VARIANTS = ("fp32", "accurate", "default", "fast")
_TIE = 0.03
"""Variants whose counts differ by less than this share are of one rank."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step, forward and backward."""

    predicted: float
    """Bytes, or seconds."""
    found: float
    """Bytes that were counted, or seconds that were measured."""


def options_of(variant: str) -> dict[str, Any]:
    """The backend's options for a variant."""
    return {"policy": variant} if variant == "fp32" else {"dtype": "bf16", "policy": variant}


def traffic(workload: Workload, variant: str) -> Traffic:
    """Predict and count the bytes of one step of a workload under a policy."""
    torch._dynamo.reset()
    model, inputs = make(workload, 0, torch.device("cpu"))
    compiled = torch.compile(model.train(), backend="mixprec", options=options_of(variant))
    metrics.reset()
    with _counting():
        compiled(*inputs).backward()
    graphs = [after.graph for report in mpcompile.reports(compiled) for _, after in report.modules]
    return Traffic(sum(map(bytes_moved, graphs)), metrics.num_bytes_accessed)


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Let Inductor count while it schedules; leave its kernels out."""
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    level, log.propagate = log.level, False
    log.setLevel(logging.INFO)  # it counts for its log
    log.addHandler(logging.NullHandler())
    with (
        mock.patch.object(joint_pass, "has_native_bf16", return_value=True),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    log.setLevel(level)


def misranked(variants: dict[str, Traffic], tie: float = _TIE) -> list[tuple[str, str]]:
    """The pairs of variants that the prediction puts in another order than was found, or in none.

    ``tie``: variants that were found to differ by less than this share are of one rank.
    """
    pairs = itertools.combinations(variants, 2)
    return [pair for pair in pairs if _is_misranked(*(variants[name] for name in pair), tie)]


def _is_misranked(first: Traffic, second: Traffic, tie: float) -> bool:
    differ = abs(first.found - second.found) > tie * max(first.found, second.found)
    return differ and (first.found - second.found) * (first.predicted - second.predicted) <= 0


def main() -> None:
    """Measure every workload and print predicted and counted megabytes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    only = parser.parse_args().only.lower()
    table = Table("workload", *VARIANTS, "misranked", title="MB moved by one step: predicted / counted by Inductor")
    for workload in workloads("cpu"):
        if workload.training and only in workload.name.lower():
            found = {variant: traffic(workload, variant) for variant in VARIANTS}
            cells = [f"{each.predicted / 1e6:.2f} / {each.found / 1e6:.2f}" for each in found.values()]
            wrong = ", ".join(f"{a} and {b}" for a, b in misranked(found))
            table.add_row(workload.name, *cells, wrong or "none")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
