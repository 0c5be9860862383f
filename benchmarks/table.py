"""The figures of a run as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.peers import BASELINE, EAGER, FP32, LOW, MIXPREC
from benchmarks.results import Measurement, Result, Run

PEERS = (MIXPREC, BASELINE, EAGER, FP32, LOW)
RATIOS = {"step_ms": "time", "saved_bytes": "saved bytes", "error": "error"}
"""Quantities that are shown as mixprec over the baseline, below 1 is better."""


def times(run: Run) -> Table:
    """Milliseconds of a step of every peer, and of its matmuls alone."""
    table = _table(
        f"One step, ms: medians of {run.rounds} interleaved rounds, {run.dtype}, policy {run.preset}",
        *PEERS,
        "GEMMs fp32",
        f"GEMMs {run.dtype}",
    )
    for result in run.results:
        values = [*(result.peers[peer].step_ms for peer in PEERS), result.gemm_fp32_ms, result.gemm_low_ms]
        table.add_row(result.workload, *(f"{value:.1f}" for value in values))
    return table


def ratios(run: Run) -> Table:
    """mixprec against the baseline, with geometric means over the training workloads."""
    headers = (*RATIOS.values(), "error", "saved MB", "casts", "cast MB")
    table = _table(f"{MIXPREC} / {BASELINE}: below 1 is better; then the values themselves", *headers)
    for result in run.results:
        table.add_row(result.workload, *(_ratio(result.ratio(q, MIXPREC)) for q in RATIOS), *_values(result))
    if any(result.training for result in run.results):
        table.add_section()
        means = (_ratio(run.mean_ratio(quantity, MIXPREC)) for quantity in RATIOS)
        table.add_row("geometric mean, training", *means, "", "", "", "")
    return table


def memory(run: Run) -> Table:
    """Peak bytes of a step on a GPU, megabytes."""
    table = _table("Most memory that one step needs at once, MB", *PEERS)
    for result in run.results:
        table.add_row(result.workload, *(_megabytes(result.peers[peer].peak_bytes) for peer in PEERS))
    return table


def starts(run: Run) -> Table:
    """Seconds to the end of the first step in a new process, with empty and with filled caches."""
    peers = [peer for peer in PEERS if peer != EAGER]
    table = _table("Seconds to the end of the first step in a new process, cold / warm", *peers)
    for result in run.results:
        table.add_row(result.workload, *(_start(result.peers[peer]) for peer in peers))
    return table


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title)
    table.add_column("workload")
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _values(result: Result) -> list[str]:
    pair = (result.peers[MIXPREC], result.peers[BASELINE])
    return [
        " / ".join(f"{measured.error:.1e}" for measured in pair),
        " / ".join(_megabytes(measured.saved_bytes) for measured in pair),
        " / ".join(_count(measured.casts) for measured in pair),
        " / ".join(_megabytes(measured.cast_bytes) for measured in pair),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _start(measured: Measurement) -> str:
    if measured.cold_start_s is None or measured.warm_start_s is None:
        return "-"
    return f"{measured.cold_start_s:.1f} / {measured.warm_start_s:.1f}"
