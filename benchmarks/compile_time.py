"""Measure compile time, cold and from a warm cache, each in its own process: ``python -m benchmarks.compile_time``.

Time is from ``torch.compile`` to the end of the first forward and backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import make
from benchmarks.peers import DTYPES, EAGER, peers
from benchmarks.workloads import workloads
from mpcompile.measurement import seconds


def main() -> None:
    """Parse the command line; measure one start (``--once``), or all of them and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--once", nargs=2, metavar=("WORKLOAD", "PEER"), help="measure in this process")
    parser.add_argument("--rounds", type=int, default=3, help="cold and warm starts per peer")
    parser.add_argument("--workload", default="GPT")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--preset", default="default", help="mixprec's policy")
    arguments = parser.parse_args()
    if arguments.once:
        sys.stdout.write(f"{_first_step(*arguments.once, arguments.dtype, arguments.preset):.3f}\n")
        return
    Console().print(_table(arguments.workload, arguments.dtype, arguments.preset, arguments.rounds))


def start_times(workload: str, peer: str, dtype: str, preset: str) -> tuple[float, float]:
    """Seconds of a cold and of a warm start, in processes of their own."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_in_process(workload, peer, dtype, preset, cache) for _ in range(2))
    return cold, warm


def _first_step(workload_name: str, peer_name: str, dtype: str, preset: str) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (workload,) = (w for w in workloads(device.type) if w.name == workload_name)
    (peer,) = (p for p in peers(device.type, dtype, preset) if p.name == peer_name)
    workload = dataclasses.replace(workload, micro_batches=1)
    model, inputs = make(workload, 0, device)
    return seconds(lambda: peer.candidate(workload, model, inputs).step(), device)


def _table(workload: str, dtype: str, preset: str, rounds: int) -> Table:
    names = [peer.name for peer in peers("cpu", dtype, preset) if peer.name != EAGER]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(start_times(workload, name, dtype, preset))
    table = Table(title=f"Seconds to the end of the first step of {workload}, medians of {rounds}")
    for column in ("", "cold", "warm"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_row(name, *(f"{statistics.median(times):.1f}" for times in zip(*found[name], strict=True)))
    return table


def _in_process(workload: str, peer: str, dtype: str, preset: str, cache: str) -> float:
    module = [sys.executable, "-m", "benchmarks.compile_time", "--once", workload, peer]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [*module, "--dtype", dtype, "--preset", preset]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
