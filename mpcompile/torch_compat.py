"""Private parts of torch that mpcompile reads, each with what is relied on; ``test_torch_compat`` watches them.

``compiler`` holds the calls into AOTAutograd and Inductor; nothing else touches private names.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import detect_fake_mode

from mpcompile.passes.graph import normalise_path
from mpcompile.passes.intent import Scope

_CompileWrapper = torch._TorchCompileWrapper  # one instance per torch.compile call with a backend of ours


@dataclass(frozen=True, slots=True)
class Site:
    """Who asked Dynamo for the graph being compiled."""

    compiled: Any
    """The object that stands for the ``torch.compile`` call; None when a backend is called by hand."""
    root: nn.Module | None
    """The compiled model; None where a plain function was compiled."""
    function: Any
    """The compiled function; None where a model was compiled."""
    scope: Scope
    """The names there are in the model."""
    locals: Mapping[str, str]
    """Path, from the root, of every module that a local variable of the traced frame holds."""


def find_site() -> Site:
    """Find the ``torch.compile`` call and the model whose graph is being compiled, up the Python stack.

    Relies on: ``_TorchCompileWrapper.__call__`` calls the backend; ``OutputGraph.local_scope`` holds the frame's
    locals; a compiled module is called through ``OptimizedModule`` or ``nn.Module._compiled_call_impl``; a compiled
    function ``fn`` through ``compile_wrapper``.
    """
    compiled: Any = None
    function: Any = None
    variables: dict[str, Any] | None = None
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if compiled is None and isinstance(owner, _CompileWrapper):
            compiled = owner
        elif variables is None and isinstance(owner, OutputGraph):
            variables = dict(owner.local_scope)
        elif root := _compiled_module(owner):
            return Site(compiled, root, None, _scope(root), _module_locals(root, variables or {}))
        elif function is None and frame.f_code.co_name == "compile_wrapper":
            function = frame.f_locals.get("fn")
    return Site(compiled, None, function, Scope(), {})


def running_call() -> tuple[Any, nn.Module | None]:
    """The ``torch.compile`` call whose compiled code is running, and the compiled model (None for a function).

    Dynamo may run code that it compiled for another call. Relies on: compiled code is called by ``compile_wrapper``,
    whose ``self`` has the ``callback`` that leads to the backend; else as ``find_site``.
    """
    call: Any = None
    for frame in _frames():
        if call is not None:
            root = _compiled_module(frame.f_locals.get("self"))
            if root is not None:
                return call, root
        elif frame.f_code.co_name == "compile_wrapper":
            call = innermost_backend(frame.f_locals["self"].callback)
    return call, None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiled_module(owner: Any) -> nn.Module | None:
    if isinstance(owner, OptimizedModule):
        module = owner._orig_mod
        assert isinstance(module, nn.Module)
        return module
    if isinstance(owner, nn.Module) and owner._compiled_call_impl is not None:
        return owner
    return None


def _scope(root: nn.Module) -> Scope:
    return Scope(
        modules=frozenset(name for name, _ in root.named_modules()) - {""},
        parameters=frozenset(name for name, _ in root.named_parameters()),
    )


def _module_locals(root: nn.Module, variables: Mapping[str, Any]) -> dict[str, str]:
    names = {id(module): name for name, module in root.named_modules()}
    return {name: names[id(value)] for name, value in variables.items() if id(value) in names}


def compile_call(compiled: Any) -> Any:
    """The object ``find_site`` saw as ``Site.compiled``, from what ``torch.compile`` or ``Module.compile`` gave.

    Relies on: ``OptimizedModule.dynamo_ctx.callback`` (and the wrapper function's closure) leads to the backend
    through ``_torchdynamo_orig_backend``.
    """
    if isinstance(compiled, nn.Module) and not isinstance(compiled, OptimizedModule):
        compiled = compiled._compiled_call_impl
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        cells = getattr(compiled, "__closure__", None) or ()
        context = next((c.cell_contents for c in cells if hasattr(_content(c), "callback")), None)
    backend = innermost_backend(context.callback) if context is not None else None
    return backend if isinstance(backend, _CompileWrapper) else None


def subject_of(compiled: Any) -> Any:
    """The model or function behind what ``torch.compile`` or ``Module.compile`` gave.

    Relies on: ``OptimizedModule._orig_mod``, and ``_torchdynamo_orig_callable`` of a compiled function.
    """
    if isinstance(compiled, OptimizedModule):
        return compiled._orig_mod
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def fork(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph to work on: Dynamo reads its own again after the backend returns.

    Relies on: ``_dynamo_source`` on placeholders, ``_param_name_to_source`` and ``meta`` on the module (AOTAutograd
    takes static input indices and duplicate-argument guards from them).
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy


def name_modules(gm: fx.GraphModule, local_modules: Mapping[str, str]) -> None:
    """Spell the module path of every node from the compiled model's root, in every graph of it.

    Dynamo spells it from a local variable of the frame it traced. After a graph break that frame may be a submodule's,
    and may hold a module that is about to be called as ``___stack0``; nodes of the frame itself have no path at all.

    Relies on: ``nn_module_stack`` holds (path, class) pairs, the path spelled ``L['self'].layer``.
    """
    frame = local_modules.get("self")
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        named = {key: (_from_root(path, local_modules), cls) for key, (path, cls) in stack.items()}
        if named:
            node.meta["nn_module_stack"] = named
        elif frame and node.op.startswith("call"):
            node.meta["nn_module_stack"] = {"self": (_from_root("L['self']", local_modules), nn.Module)}


_LOCAL = re.compile(r"^L\['([^']+)'\]")
_VARIABLE = re.compile(r"^[LG]\['([^']+)'\]$")


def _from_root(spelled: str, local_modules: Mapping[str, str]) -> str:
    local = _LOCAL.match(spelled)
    path = local_modules.get(local[1]) if local else None
    if local is None or not path:
        return spelled
    return f"L['self'].{path}{spelled[local.end() :]}"


def parameters_of(gm: fx.GraphModule, local_modules: Mapping[str, str]) -> dict[str, str]:
    """Parameter name, from the compiled model's root, of every placeholder that is a parameter.

    One that a function reads from a variable of its own has the variable's name.

    Relies on: ``meta["grapharg"].source.name``, a property (a method before torch 2.12), spelled like
    ``L['self']._modules['layer']._parameters['weight']``.
    """
    names = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("example_value"), nn.Parameter) and "grapharg" in node.meta:
            source = node.meta["grapharg"].source
            spelled = str(source.name() if callable(source.name) else source.name)
            variable = _VARIABLE.match(spelled)
            names[node.name] = variable[1] if variable else normalise_path(_from_root(spelled, local_modules))
    return names


def add_input(gm: fx.GraphModule, name: str, value: torch.Tensor, *, static: bool = False) -> torch.Tensor:
    """Give a fork of Dynamo's graph one more input, the last, that no operation reads; return its example value.

    ``static``: it stays at its address, like a parameter; CUDA graphs then read it there instead of copying it.

    Relies on: AOTAutograd asks every placeholder for ``_dynamo_source``, None for inputs that no variable holds; it
    traces with the fake tensors of the mode that ``detect_fake_mode`` finds, and would give a real one symbolic sizes;
    it counts those among the static inputs that Dynamo marked in ``meta["tensor_dict"]``.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    with gm.graph.inserting_after(placeholders[-1]):
        node = gm.graph.placeholder(name)
    node._dynamo_source = None
    assert mode is not None
    example: torch.Tensor = mode.from_tensor(value, static_shapes=True)
    node.meta["example_value"] = example
    if static:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return example


def is_sharded(root: nn.Module | None) -> bool:
    """Whether FSDP may own the parameters of a compiled model; for a function (None), whether there are processes.

    Relies on: FSDP and ``fully_shard`` set ``_is_fsdp_managed_module`` on the modules whose parameters they shard.
    """
    if root is None:
        return torch.distributed.is_available() and torch.distributed.is_initialized()
    return any(getattr(module, "_is_fsdp_managed_module", False) for module in root.modules())


@contextlib.contextmanager
def tracing_without_autocast(*, forward: bool) -> Iterator[None]:
    """Trace with ambient autocast off in backward, and in ``forward`` where asked; regions inside the graph count.

    Relies on: ``functorch.config.backward_pass_autocast``; the default, ``same_as_forward``, lets an ambient
    autocast leak into the backward of an fp32 region.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        for device in enabled_autocasts() if forward else ():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def enabled_autocasts() -> list[str]:
    """The device types whose autocast is enabled in this thread."""
    if not torch._C._is_any_autocast_enabled():
        return []
    return [d for d in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.is_autocast_enabled(d)]


@contextlib.contextmanager
def running_without_autocast() -> Iterator[None]:
    """Exclude autocast from every op dispatched in this thread; costs under a microsecond."""
    with torch._C._DisableAutocast():
        yield


def exceptions_that_fall_back() -> tuple[type[BaseException], ...]:
    """The errors of a backend for which Dynamo breaks the graph and goes on eagerly.

    Relies on: ``torch._dynamo.exc.exceptions_allowed_to_be_fallback``.
    """
    return tuple(torch._dynamo.exc.exceptions_allowed_to_be_fallback)


def elides_roundings() -> bool:
    """Whether Inductor's C++ drops a narrowing followed by a widening in one kernel, whatever it is told.

    Relies on: from torch 2.13 on ``emulate_precision_casts`` is heeded there (pytorch issue 185337).
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def captures_recurrent_modules() -> bool:
    """Whether Dynamo captures ``nn.LSTM`` and its like; by default it runs them eagerly.

    Relies on: ``torch._dynamo.config.allow_rnn``.
    """
    return bool(torch._dynamo.config.allow_rnn)
