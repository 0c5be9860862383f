"""Measure one workload under all peers: errors, saved bytes, casts, then interleaved times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.accuracy import has_dropout, make, measure_errors, without_dropout
from benchmarks.casts import count_casts
from benchmarks.gemm_limit import collect
from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.peers import Candidate, Peer
from benchmarks.results import Measurement, Result
from benchmarks.workloads import Workload
from mpcompile.measurement import interleaved, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all workloads are measured with."""

    device: torch.device
    low: torch.dtype
    rounds: int
    """Interleaved steps per peer."""
    seeds: Sequence[int]
    """Errors are of all of them, everything else of the first."""


def measure(workload: Workload, peers: Sequence[Peer], setting: Setting) -> Result:
    """Measure ``peers`` on the same weights and inputs."""
    model, inputs = make(workload, setting.seeds[0], setting.device)
    errors = _errors_without_dropout(workload, peers, setting) if has_dropout(model) else {}
    candidates = _candidates(workload, peers, model, inputs)
    first = {name: _first_step(candidate) for name, candidate in candidates.items()}
    errors = errors or measure_errors(list(candidates.values()), setting.seeds)
    for candidate in candidates.values():
        candidate.load(model, inputs)
    saved = {name: saved_bytes(candidate) if workload.training else None for name, candidate in candidates.items()}
    peak = {name: peak_bytes(candidate) for name, candidate in candidates.items()}
    gemms = {str(dtype): _gemms(workload, model, inputs, dtype) for dtype in (torch.float32, setting.low)}
    times = interleaved(
        {**{name: candidate.step for name, candidate in candidates.items()}, **gemms},
        setting.rounds,
        setting.device,
        {name: candidate.prepare for name, candidate in candidates.items()},
    )
    torch._dynamo.reset()  # counting casts compiles the same code again, and Dynamo limits how often
    casts = {name: count_casts(candidate) for name, candidate in candidates.items()}
    figures = {
        name: Measurement(
            step_ms=times[name] * 1e3,
            first_step_s=first[name],
            saved_bytes=saved[name],
            peak_bytes=peak[name],
            errors=errors[name],
            casts=casts[name][0],
            cast_bytes=casts[name][1],
        )
        for name in candidates
    }
    fp32, low = (times[name] * workload.micro_batches * 1e3 for name in gemms)  # one replay is one micro-batch
    return Result(workload=workload.name, training=workload.training, peers=figures, gemm_fp32_ms=fp32, gemm_low_ms=low)


def _candidates(
    workload: Workload, peers: Sequence[Peer], model: nn.Module, inputs: tuple[Tensor, ...]
) -> dict[str, Candidate]:
    torch._dynamo.reset()  # else they might run what was compiled for others
    return {peer.name: peer.candidate(workload, model, inputs) for peer in peers}


def _errors_without_dropout(
    workload: Workload, peers: Sequence[Peer], setting: Setting
) -> dict[str, tuple[float, ...]]:
    model, inputs = make(workload, setting.seeds[0], setting.device)
    candidates = _candidates(workload, peers, without_dropout(model), inputs)
    return measure_errors(list(candidates.values()), setting.seeds)


def _first_step(candidate: Candidate) -> float:
    return seconds(candidate.step, candidate.device)


def _gemms(workload: Workload, model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Callable[[], None]:
    peer = Peer(name=f"eager {dtype}", compile=lambda model, _: model, dtype=dtype)
    single = dataclasses.replace(workload, micro_batches=1)
    return collect(peer.candidate(single, model, inputs).step).replay
