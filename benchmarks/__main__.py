"""Measure mixprec against autocast and fp32, all through Inductor: ``python -m benchmarks [--rounds N]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import DTYPES, Measurement, measure, peers
from benchmarks.workloads import workloads
from mpcompile.device import has_native_bf16


def main() -> None:
    """Parse the command line, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved steps per peer")
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, help="CPU threads; one is steadier on a shared machine")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = {}
    for workload in workloads("cpu"):
        if workload.training and arguments.only.lower() in workload.name.lower():
            results[workload.name] = measure(workload, peers(arguments.dtype), arguments.rounds)
    console = Console(width=110)
    console.print(_table(results, arguments.dtype))
    console.print(_hardware())
    if arguments.json:
        figures = {n: {p: dataclasses.asdict(m) for p, m in r.items()} for n, r in results.items()}
        text = json.dumps(
            {"hardware": _hardware(), "dtype": arguments.dtype, "rounds": arguments.rounds, **figures}, indent=1
        )
        arguments.json.write_text(text + "\n")


def _table(results: dict[str, dict[str, Measurement]], dtype: str) -> Table:
    table = Table(title=f"One training step, {dtype}; ratios are mixprec / autocast, below 1 is better")
    for column in ("workload", "mixprec", "autocast", "fp32", "time", "saved MB", "saved", "error"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for name, found in results.items():
        ours, theirs = found["mixprec"], found["autocast"]
        table.add_row(
            name,
            *(f"{found[peer].step_ms:.1f} ms" for peer in ("mixprec", "autocast", "fp32")),
            f"{ours.step_ms / theirs.step_ms:.2f}",
            f"{ours.saved_bytes / 1e6:.2f}",
            f"{ours.saved_bytes / theirs.saved_bytes:.2f}",
            f"{ours.gradient_error / theirs.gradient_error:.2f}",
        )
    return table


def _hardware() -> str:
    native = "native bf16" if has_native_bf16(torch.device("cpu")) else "no native bf16"
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {platform.machine()}, threads: {threads}, {native}"


if __name__ == "__main__":
    main()
