"""Measure mixprec against autocast, fp32 and pure 16-bit models: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import hardware, table
from benchmarks.compile_time import start_times
from benchmarks.measure import Setting, measure
from benchmarks.peers import DTYPES, EAGER, peers
from benchmarks.results import Result, Run
from benchmarks.workloads import Workload, workloads


def main() -> None:
    """Parse the command line, measure, print the tables, write JSON and plot."""
    arguments = _parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [w for w in workloads(device.type) if arguments.only.lower() in w.name.lower()]
    if not chosen:
        names = ", ".join(workload.name for workload in workloads(device.type))
        raise SystemExit(f"No workload's name contains {arguments.only!r}; there are: {names}.")
    console = Console(width=160)
    seeds = list(range(arguments.seeds))
    run = Run(
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        dtype=arguments.dtype,
        preset=arguments.preset,
        device=device.type,
        rounds=arguments.rounds,
        seeds=seeds,
        versions=hardware.versions(),
        hardware=hardware.describe(device),
    )
    setting = Setting(device=device, low=DTYPES[arguments.dtype], rounds=arguments.rounds, seeds=seeds)
    for workload in chosen:
        console.print(f"measuring {workload.name} ...", style="dim")
        result = measure(workload, peers(device.type, arguments.dtype, arguments.preset), setting)
        run.results.append(_with_starts(result, workload, run) if arguments.compile_time else result)
        if arguments.json:
            run.write(arguments.json)  # after each, so that a run that is cut short leaves what it found
    _show(run, console, compile_time=arguments.compile_time)
    if arguments.plot:
        from benchmarks.plot import plot  # the only need of matplotlib

        plot(run, arguments.plot)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--preset", choices=("accurate", "default", "fast"), default="default", help="mixprec's policy")
    parser.add_argument("--rounds", type=_positive, default=15, help="interleaved steps per peer")
    parser.add_argument("--seeds", type=_positive, default=1, help="weights and inputs the errors are measured on")
    parser.add_argument("--only", default="", help="measure the workloads whose name contains this")
    parser.add_argument("--threads", type=_positive, help="CPU threads; one is steadier on a shared machine")
    parser.add_argument("--compile-time", action="store_true", help="also measure cold and warm starts (many minutes)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this PNG file")
    arguments = parser.parse_args()
    for path in (arguments.json, arguments.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path} cannot be written: there is no folder {path.parent}")
    return arguments


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _with_starts(result: Result, workload: Workload, run: Run) -> Result:
    measured = {}
    for name, figures in result.peers.items():
        if name == EAGER:  # compiles nothing
            measured[name] = figures
            continue
        cold, warm = start_times(workload.name, name, run.dtype, run.preset)
        measured[name] = dataclasses.replace(figures, cold_start_s=cold, warm_start_s=warm)
    return dataclasses.replace(result, peers=measured)


def _show(run: Run, console: Console, *, compile_time: bool) -> None:
    console.print(table.times(run))
    console.print(table.ratios(run))
    if run.device == "cuda":
        console.print(table.memory(run))
    if compile_time:
        console.print(table.starts(run))
    console.print(", ".join(f"{key}: {value}" for key, value in (run.versions | run.hardware).items()))
    if caveat := hardware.caveat(run.dtype, run.hardware):
        console.print(caveat)


if __name__ == "__main__":
    main()
