"""Where a graph enters: the backend behind ``torch.compile(model, backend="mixprec")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mpcompile import checks
from mpcompile.ambient import Autocast
from mpcompile.analysis.check import Check
from mpcompile.compiler import (
    Execute,
    compile_with_aot_eager,
    compile_with_inductor,
    compile_with_reference,
    mode_settings,
)
from mpcompile.device import automatic_dtype, main_device
from mpcompile.execution.fp32_matmul import fp32_matmul_precision, with_fp32_matmul
from mpcompile.graph_inputs import GraphInputs
from mpcompile.inspection.recorder import Recorder
from mpcompile.inspection.registry import Compilation, remember
from mpcompile.joint_pass import JointPass, emulates
from mpcompile.loss_scaling import LossScaling, runtime_of
from mpcompile.options import Options
from mpcompile.passes.intent import MATMULS, read_intent, where_marked
from mpcompile.passes.kernels import lower_kernels
from mpcompile.torch_compat import find_site, fork, name_modules, parameters_of
from mpcompile.weight_caching import WeightCaching


def mixprec(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs in mixed precision; torch calls this, through the entry point ``mixprec``.

    ``mode`` means what it means for Inductor; ``options`` are those of ``mpcompile.options.Options``. Raises
    ``ValueError`` for options that are unknown or contradict each other and rules that match nothing.
    """
    return compile_graph(gm, example_inputs, Options.parse(options), mode)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Options,
    mode: str | None = None,
    execute: Execute | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs; with ``execute``, that runs the rewritten graphs instead of the compiler."""
    site = find_site()
    device = main_device(example_inputs)
    policy = settings.resolve_policy(automatic_dtype(device))
    checks.before_compiling(example_inputs, settings, policy, site)

    graph = fork(gm)
    name_modules(graph, site.locals)
    parameters = parameters_of(graph, site.locals)
    intent = read_intent(graph, policy, site.scope, parameters)
    autocast = Autocast.around(graph, policy, device)
    trained = torch.is_grad_enabled() and settings.scaling(policy.dtype) is not None
    cached = settings.weight_cache and not policy.is_fp32 and checks.may_cache(site, settings)
    inputs = GraphInputs.of(graph, example_inputs, parameters, policy.dtype, scaled=trained, cached=cached)
    inputs.mark_range(graph)
    kernels = lower_kernels(graph, policy)
    scaling = LossScaling.attach(graph, inputs, device, site.compiled)
    emulated = settings.compiler == "inductor" and emulates(policy, example_inputs)
    caching = WeightCaching.attach(graph, inputs, policy, emulated=emulated, strict=settings.strict)

    in_aten = policy.only_op_rules()  # module and parameter rules are marks on the nodes by now
    recorder = Recorder(in_aten, (intent, kernels))
    key = (*settings.key(), *where_marked(graph))
    # Inductor's fused attention would swallow the marks of its matmuls and softmax, and the names of its ATen ops.
    attention = MATMULS | {"softmax"}
    pinned = bool(in_aten.fp32) or any(c.op in attention and c.after == "fp32" for c in intent.changes)
    if settings.check and mode is not None:
        raise ValueError(f"check=True runs operations one by one; it contradicts mode={mode!r}.")
    if settings.check and execute is None:
        execute = Check(settings, lambda: runtime_of(site.compiled, site.root)).execute
    joint = JointPass(in_aten, recorder, key, inputs, pinned)
    compilation = Compilation(recorder, joint.uuid(), graph, cached=settings.compiler == "inductor")
    with autocast.tracing(), fp32_matmul_precision(settings.fp32_matmul):
        inputs_and_state = [*example_inputs, *scaling.state, *caching.state]
        if execute is not None:
            compiled = compile_with_reference(graph, inputs_and_state, joint, execute)
        else:
            compiled = _compile(graph, inputs_and_state, joint, settings, mode)
    remember(site, compilation)
    checks.after_compiling(recorder, settings)
    return with_fp32_matmul(autocast.wrap(scaling.wrap(caching.wrap(compiled))), settings.fp32_matmul)


def _compile(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    joint: JointPass,
    settings: Options,
    mode: str | None,
) -> Callable[..., Any]:
    try:
        if settings.compiler == "inductor":
            return compile_with_inductor(graph, example_inputs, joint, _inductor(settings, mode))
        if mode is not None:
            raise ValueError(f"mode={mode!r} is for compiler='inductor' only.")
        if settings.compiler == "aot_eager":
            return compile_with_aot_eager(graph, example_inputs, joint)
        return compile_with_reference(graph, example_inputs, joint)
    except checks.FALLS_BACK_TO_EAGER as error:
        checks.outside(error, graph, settings)
        raise


def _inductor(settings: Options, mode: str | None) -> dict[str, Any]:
    strict = {"emulate_precision_casts": True} if settings.numerics == "strict" else {}
    return {**strict, **mode_settings(mode), **settings.inductor}
