"""Measure compile time, cold and from a warm cache, each in its own process: ``python -m benchmarks.compile_time``.

Time is from ``torch.compile`` to the end of the first forward and backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Peer, peers
from benchmarks.workloads import workloads

_PEERS = {peer.name: peer for peer in peers("bf16")}


def main() -> None:
    """Parse the command line; measure one start (``--once``), or all of them and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--once", nargs=2, metavar=("WORKLOAD", "PEER"), help="measure in this process")
    parser.add_argument("--rounds", type=int, default=3, help="cold and warm starts per peer")
    parser.add_argument("--workload", default="GPT")
    arguments = parser.parse_args()
    if arguments.once:
        workload, peer = arguments.once
        sys.stdout.write(f"{_first_step(workload, _PEERS[peer]):.3f}\n")
        return
    Console().print(_table(arguments.workload, arguments.rounds))


def _first_step(name: str, peer: Peer) -> float:
    torch.manual_seed(0)
    (workload,) = (w for w in workloads("cpu") if w.name == name)
    model, inputs = workload.model(), workload.inputs()
    start = time.perf_counter()
    compiled = peer.compile(model)
    with peer.context():
        loss = compiled(*inputs)
    loss.backward()
    return time.perf_counter() - start


def _table(workload: str, rounds: int) -> Table:
    cold: dict[str, list[float]] = {name: [] for name in _PEERS}
    warm: dict[str, list[float]] = {name: [] for name in _PEERS}
    for _ in range(rounds):
        for name in _PEERS:
            with tempfile.TemporaryDirectory() as cache:
                cold[name].append(_in_process(workload, name, cache))
                warm[name].append(_in_process(workload, name, cache))
    table = Table(title=f"Seconds to the end of the first step of {workload}, medians of {rounds}")
    for column in ("", "cold", "warm"):
        table.add_column(column, justify="right")
    for name in _PEERS:
        table.add_row(name, f"{statistics.median(cold[name]):.1f}", f"{statistics.median(warm[name]):.1f}")
    return table


def _in_process(workload: str, peer: str, cache: str) -> float:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--once", workload, peer]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
