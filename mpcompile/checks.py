"""Look for what the user may not expect, before and after a graph is compiled, and say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from mpcompile.notices import MixprecError, notify
from mpcompile.passes.graph import LOW_DTYPES
from mpcompile.passes.policy import Policy
from mpcompile.torch_compat import (
    captures_recurrent_modules,
    enabled_autocasts,
    exceptions_that_fall_back,
    is_sharded,
)

if TYPE_CHECKING:
    from mpcompile.inspection.recorder import Recorder
    from mpcompile.options import Options
    from mpcompile.torch_compat import Site

FALLS_BACK_TO_EAGER = exceptions_that_fall_back()
"""What a backend may raise for which Dynamo does not fail but runs the graph eagerly."""


def before_compiling(inputs: Sequence[Any], options: Options, policy: Policy, site: Site) -> None:
    """Warn of what the graph and the model show by themselves."""
    if policy.is_fp32 and (options.policy == "fp32" or isinstance(options.policy, Policy)):
        return
    _check_auto(options, policy)
    _check_autocast(options)
    _check_masters(inputs, options)
    _check_recurrent(site.root, options)


def _check_auto(options: Options, policy: Policy) -> None:
    if policy.is_fp32 and not options.strict:
        notify(
            "mixprec leaves this model in float32: its device does not compute bf16 natively. "
            "options={'dtype': 'bf16'} uses bf16 all the same.",
            strict=False,
        )
    elif policy.is_fp32:
        raise MixprecError(
            "dtype='auto' found no device that computes bf16 or fp16 natively; give options={'dtype': 'bf16'}."
        )


def _check_autocast(options: Options) -> None:
    if enabled_autocasts():
        notify(
            "torch.autocast is active around a model compiled with mixprec. mixprec decides the precision of every "
            "operation itself; remove the autocast context.",
            strict=options.strict,
        )


def _check_masters(inputs: Sequence[Any], options: Options) -> None:
    low = [v for v in inputs if isinstance(v, nn.Parameter) and v.dtype in LOW_DTYPES]
    # master_weights() lets gradients be accumulated in fp32, whatever the parameter's dtype.
    trained = [value for value in low if value.requires_grad and value.grad_dtype is not torch.float32]
    if trained and torch.is_grad_enabled():
        notify(
            f"{len(trained)} trained parameters are {str(trained[0].dtype)[6:]}: they have no float32 master copy, and "
            "small updates round away. mpcompile.master_weights(model, optimizer) makes one; or load the model "
            "in float32 (model.float()): mixprec computes in 16 bits itself.",
            strict=options.strict,
        )


def _check_recurrent(root: nn.Module | None, options: Options) -> None:
    if root is None or captures_recurrent_modules():
        return
    names = [name for name, module in root.named_modules() if isinstance(module, nn.RNNBase)]
    if names:
        notify(
            f"Dynamo does not capture recurrent modules: {', '.join(map(repr, names))} run in float32 outside the "
            "compiled graph. torch._dynamo.config.allow_rnn = True captures them, unrolled.",
            strict=options.strict,
        )


def may_cache(site: Site, options: Options) -> bool:
    """Whether low copies of the weights may be kept: warn where not."""
    if not is_sharded(site.root):
        return True
    notify(
        "weight_cache=True does nothing for a model under FSDP, or for a function in torch.distributed: FSDP gathers "
        "the weights anew for every call, without a trace that a copy could follow.",
        strict=options.strict,
    )
    return False


def after_compiling(recorder: Recorder, options: Options) -> None:
    """Warn where a graph with weight matrices computes nothing low, with the reasons."""
    if recorder.is_fp32 or not recorder.has_weights:
        return
    reasons = recorder.reasons_for_nothing_low()
    if reasons is not None:
        notify(f"No operation of this graph computes in 16 bits: {reasons}.", strict=options.strict)


def outside(error: BaseException, gm: fx.GraphModule, options: Options) -> None:
    """Say that torch is about to run a graph eagerly, in fp32, because its compilation failed with ``error``."""
    lines = [node.meta.get("stack_trace") for node in gm.graph.nodes if node.meta.get("stack_trace")]
    where = str(lines[0]).strip().splitlines()[0].strip() if lines else "unknown line"
    notify(
        f"A part of the model ({where}, {len(list(gm.graph.nodes))} operations) could not be compiled and runs eagerly "
        f"in float32: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        strict=options.strict,
    )
