"""The error of gradients (in inference: outputs) against fp64.

Dropout is off here, for all peers and the truth: a mask drawn by generated code cannot be drawn again in fp64, and a
mask handed in as an input would change what is measured besides, the saved bytes. Where dropout rounds, it multiplies
by a constant in the middle of an elementwise chain; matmuls and norms, where the errors are made, are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.peers import Candidate, Peer, cast_floating
from benchmarks.workloads import Workload


def has_dropout(model: nn.Module) -> bool:
    """Whether a step of the model, as it stands, draws random numbers."""
    return any(module.p > 0 for module in _dropouts(model))


def without_dropout(model: nn.Module) -> nn.Module:
    """The model itself, its dropout set to 0."""
    for module in _dropouts(model):
        module.p = 0.0
    return model


def make(workload: Workload, seed: int, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The workload's model in fp32 and its inputs, from a seed."""
    torch.manual_seed(seed)
    model = workload.model().to(device).train(workload.training)
    return model, tuple(value.to(device) for value in workload.inputs())


def measure_errors(candidates: Sequence[Candidate], seeds: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Per peer one relative error for each seed (weights and inputs); the candidates keep the last one's.

    Raises ``ValueError`` for a candidate whose model has dropout.
    """
    if noisy := [candidate.peer.name for candidate in candidates if has_dropout(candidate.model)]:
        raise ValueError(f"Errors need the same step again, and {noisy} draw dropout; see without_dropout.")
    errors: dict[str, list[float]] = {candidate.peer.name: [] for candidate in candidates}
    for seed in seeds:
        model, inputs = make(candidates[0].workload, seed, candidates[0].device)
        without_dropout(model)
        truth = _truth(candidates[0].workload, model, inputs)
        for candidate in candidates:
            candidate.load(model, inputs)
            errors[candidate.peer.name].append(relative_error(result_of(candidate), truth))
    return {name: tuple(values) for name, values in errors.items()}


def result_of(candidate: Candidate) -> Tensor:
    """The gradient of all parameters together, in inference the output, as one fp64 vector."""
    candidate.model.zero_grad()
    output = candidate.step()
    if not candidate.workload.training:
        return output.detach().double().flatten()
    gradients = [p.grad for p in candidate.model.parameters() if p.grad is not None]
    candidate.model.zero_grad()
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((found - truth).norm() / truth.norm())


def _truth(workload: Workload, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    wide = copy.deepcopy(model).double()
    peer = Peer(name="fp64", compile=lambda model, _: model, dtype=torch.float64)
    return result_of(Candidate(peer, workload, wide, wide, cast_floating(inputs, torch.float64)))


def _dropouts(model: nn.Module) -> list[nn.Dropout]:
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]
