"""``tune``: the fewest fp32 rules that keep a model's error within a tolerance."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils._pytree import tree_leaves

from mpcompile.analysis.capture import Batch, Loss
from mpcompile.device import automatic_dtype, main_device
from mpcompile.notices import MixprecError
from mpcompile.options import Options
from mpcompile.passes.policy import Policy
from mpcompile.tuning.cost import OBJECTIVES
from mpcompile.tuning.evaluation import Trial
from mpcompile.tuning.evidence import evidence
from mpcompile.tuning.search import Evaluation, OutOfBudget, Unreachable, search
from mpcompile.tuning.state import Measurements

MARGIN = 0.8
"""The share of the tolerance that is used up on the given batches, so that other batches stay within it."""


def tune(
    model: Callable[..., Any],
    batches: Iterable[Any],
    *,
    tolerance: float = 0.02,
    objective: str = "time",
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    state: str | Path | None = None,
    max_evaluations: int = 25,
    progress: bool = True,
) -> Policy:
    """Find the fewest rules for fp32 that keep the error of loss and gradients within ``tolerance``.

    ``batches``: a tuple of arguments, a dict of keyword arguments or the only argument, for each; a few are enough.
    ``tolerance``: for the mean relative error over loss and gradients against fp64 (that of ``compare``) and the
    relative error of the loss by itself, on every batch. ``objective``: of rules that do as much, those are dropped
    first that cost the most ``"time"`` or ``"memory"``. ``loss`` as for ``compare``; ``options`` as for the backend:
    dtype, preset and rules given there are kept. ``state``: a file that measurements are kept in, to go on after an
    interruption. The result is the same in every run.

    Which rules help is read off one backward sweep over the fp64 graph; what is chosen is then measured, at most
    ``max_evaluations`` times. The policy's ``notes`` hold the evidence, and ``policy.to_toml()`` writes them as
    comments: the file is usable as ``options={"policy": "file.toml"}``.

    Raises ``ValueError`` for arguments that make no sense, and ``MixprecError`` where no set of rules was found, with
    the smallest error that was reached, or where a value is not finite that no rule would make so.
    """
    tried = [Batch.of(batch) for batch in batches]
    start = _start(model, tried, options)
    _require(tried, tolerance, objective, max_evaluations)
    trial = Trial(model, tried, dict(options or {}), loss, objective)
    console = Console(stderr=True, quiet=not progress)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("tune", total=max_evaluations)

        def advance(found: Evaluation) -> None:
            bar.update(task, advance=1, description=f"tune: error {found.error:.1e}, tolerance {tolerance:.1e}")

        measurements = Measurements(
            trial.evaluate,
            path=None if state is None else Path(state),
            key=_key(model, tried, options, objective),
            limit=max_evaluations,
            advance=advance,
        )
        try:
            found = search(measurements.evaluate, MARGIN * tolerance)
        except Unreachable as error:
            raise MixprecError(_unreachable(error, tolerance)) from None
        except OutOfBudget:
            raise MixprecError(
                f"tune did not meet tolerance={tolerance:g} in {max_evaluations} measurements; give it more with "
                "max_evaluations, or a larger tolerance."
            ) from None
        bar.update(task, completed=max_evaluations, description=f"tune: {len(found.rules)} rules")
    notes = evidence(found, measurements.evaluate(()), tolerance, objective, measurements.count)
    return replace(start, fp32=(*start.fp32, *found.rules), notes=notes)


def _start(model: Callable[..., Any], batches: list[Batch], options: Mapping[str, Any] | None) -> Policy:
    settings = Options.parse(options)
    tensors = model.parameters() if isinstance(model, nn.Module) else tree_leaves([b.args for b in batches])
    policy = settings.resolve_policy(automatic_dtype(main_device(tensors)))
    if policy.is_fp32:
        raise MixprecError("There is nothing to tune: this model stays in fp32. Give options={'dtype': 'bf16'}.")
    if policy.preset == "torch" or isinstance(settings.policy, Policy):
        raise ValueError(
            "tune adds rules to options `dtype`, `policy` (a preset other than 'torch'), `fp32` and `low`; give those "
            "instead of a Policy or policy='torch'."
        )
    return policy


def _require(batches: list[Batch], tolerance: float, objective: str, max_evaluations: int) -> None:
    if not batches:
        raise ValueError("tune needs at least one batch to measure on.")
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance` is a relative error between 0 and 1, got {tolerance!r}.")
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` must be one of {', '.join(map(repr, OBJECTIVES))}; got {objective!r}.")
    if max_evaluations < 1:
        raise ValueError(f"`max_evaluations` must be at least 1, got {max_evaluations!r}.")


def _key(model: Callable[..., Any], batches: list[Batch], options: Mapping[str, Any] | None, objective: str) -> str:
    """A digest of what is measured: parameters and batches by value, options by name."""
    digest = hashlib.sha256(repr((objective, sorted((options or {}).items(), key=str))).encode())
    values = list(model.state_dict().items()) if isinstance(model, nn.Module) else []
    for leaf in tree_leaves((values, [(batch.args, dict(batch.kwargs)) for batch in batches])):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(_bytes(leaf))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    """The memory of a tensor's elements; without numpy, which torch does not need."""
    dense = value.detach().cpu().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def _unreachable(error: Unreachable, tolerance: float) -> str:
    rules = ", ".join(map(repr, error.rules[:8])) + (", ..." if len(error.rules) > 8 else "")
    return (
        f"tune cannot meet tolerance={tolerance:g}: with {len(error.rules)} rules ({rules}) the error is still "
        f"{error.evaluation.error:.2e}. What is left is rounded by the model itself or magnified in fp32; "
        "mpcompile.compare(model, *inputs) shows where. Or give a larger tolerance."
    )
