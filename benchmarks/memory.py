"""Bytes that a training step keeps between forward and backward, and the most that it needs at once."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers import Candidate
from mpcompile.measurement import kept_storages


def saved_bytes(candidate: Candidate) -> int:
    """Bytes of the storages that one forward makes and keeps for backward, apart from parameters, buffers and inputs.

    A storage counts once, however many views of it are kept. Low copies of weights count where each forward makes its
    own; copies that live between steps (the weight cache) are kept by the forward before as well, and do not.
    """
    first, loss_before = _kept(candidate)
    second, loss = _kept(candidate)  # while the first is alive: a freed tensor's address may be another's
    loss_before.backward()
    loss.backward()
    candidate.model.zero_grad()
    return sum(size for address, size in second.items() if address not in first)


def _kept(candidate: Candidate) -> tuple[dict[int, int], Tensor]:
    model = candidate.model
    return kept_storages(candidate.run_forward, (*model.parameters(), *model.buffers(), *candidate.inputs))


def peak_bytes(candidate: Candidate) -> int | None:
    """The most bytes one step needs at once on a GPU, above what was there before it; None on a CPU."""
    if candidate.device.type != "cuda":
        return None
    candidate.prepare()
    torch.cuda.synchronize(candidate.device)
    torch.cuda.reset_peak_memory_stats(candidate.device)
    before = torch.cuda.memory_allocated(candidate.device)
    candidate.step()
    torch.cuda.synchronize(candidate.device)
    return torch.cuda.max_memory_allocated(candidate.device) - before
