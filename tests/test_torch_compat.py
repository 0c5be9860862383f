"""Each private name of torch that is relied on: when torch moves it, the test named after the function fails."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile import torch_compat
from mpcompile.passes.graph import module_path
from mpcompile.torch_compat import Site, find_site, parameters_of


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.scale
        torch._dynamo.graph_break()
        return x * self.scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Seen:
    """What the functions under test find when torch calls a backend."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.sites: list[Site] = []
        self.forks: list[fx.GraphModule] = []
        self.metas: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []  # before Dynamo clears some of it

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.sites.append(self._site())
        self.forks.append(torch_compat.fork(gm))
        self.metas.append(([dict(node.meta) for node in gm.graph.nodes], dict(gm.meta)))
        return gm.forward

    @staticmethod
    def _site() -> Site:
        return find_site()


def test_find_site_of_a_compiled_model() -> None:
    seen, model = Seen(), Outer()
    compiled = torch.compile(model, backend=seen)
    compiled(torch.randn(3, 4))
    assert len(seen.sites) == 3
    for site in seen.sites:
        assert site.root is model
        assert site.compiled is torch_compat.compile_call(compiled) is not None
        assert site.scope.modules == {"inner", "inner.layers", "inner.layers.0", "out"}
        assert "inner.scale" in site.scope.parameters
    locals_of = [dict(site.locals) for site in seen.sites]
    assert locals_of[0] == {"self": "inner"}
    assert locals_of[1] == {"self": "inner"}
    assert "out" in locals_of[-1].values()


def test_find_site_of_a_module_compiled_in_place() -> None:
    seen, model = Seen(), Outer()
    model.compile(backend=seen)
    model(torch.randn(3, 4))
    site = seen.sites[0]
    assert site.root is model
    assert site.locals == {"self": "inner"}
    assert site.compiled is torch_compat.compile_call(model) is not None


def test_find_site_of_a_plain_function() -> None:
    seen = Seen()

    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(double, backend=seen)
    compiled(torch.randn(3))
    (site,) = seen.sites
    assert site.root is None
    assert site.function is double
    assert site.compiled is torch_compat.compile_call(compiled) is not None


def test_find_site_of_a_backend_called_by_hand() -> None:
    assert Seen._site() == Site(None, None, None, torch_compat.Scope(), {})


def test_compile_call_of_something_else_is_none() -> None:
    for thing in (nn.Linear(2, 2), len, None, functools.partial(len)):
        assert torch_compat.compile_call(thing) is None


class Runs:
    """A backend whose code notes which call and model it runs for."""

    def __init__(self) -> None:
        self.compiled = 0
        self.found: list[tuple[Any, nn.Module | None]] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.found.append(torch_compat.running_call())
            return gm.forward(*args)

        return run


def test_running_call_of_a_compiled_model() -> None:
    runs, model = Runs(), Outer()
    compiled = torch.compile(model, backend=runs)
    for _ in range(2):
        compiled(torch.randn(3, 4))
    assert runs.compiled == 3  # a graph break in a submodule
    assert runs.found == [(torch_compat.compile_call(compiled), model)] * 6
    assert torch_compat.compile_call(compiled) is not None


def test_running_call_of_a_module_compiled_in_place() -> None:
    runs, model = Runs(), Outer()
    model.compile(backend=runs)
    model(torch.randn(3, 4))
    assert runs.found == [(torch_compat.compile_call(model), model)] * 3
    assert torch_compat.compile_call(model) is not None


def test_running_call_of_a_plain_function() -> None:
    runs = Runs()
    compiled = torch.compile(lambda x: x * 2, backend=runs)
    compiled(torch.randn(3))
    assert runs.found == [(torch_compat.compile_call(compiled), None)]
    assert torch_compat.compile_call(compiled) is not None


def test_running_call_is_the_one_that_runs_and_not_the_one_that_compiled() -> None:
    # Two calls with equal backends share what Dynamo compiled for the first of two equal models.
    runs, models = Runs(), (nn.Linear(4, 2), nn.Linear(4, 2))
    first, second = (torch.compile(model, backend=runs) for model in models)
    for compiled in (first, second, first):
        compiled(torch.randn(3, 4))
    assert runs.compiled == 1
    assert [root for _, root in runs.found] == [models[0], models[1], models[0]]
    calls = [torch_compat.compile_call(compiled) for compiled in (first, second, first)]
    assert all(found is call for (found, _), call in zip(runs.found, calls, strict=True))
    assert calls[0] is not calls[1]


def test_running_call_inside_another_compiled_model() -> None:
    runs, inner = Runs(), nn.Linear(4, 4)
    compiled = torch.compile(inner, backend=runs)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = compiled

        @torch._dynamo.disable(recursive=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    torch.compile(Around(), backend=Runs())(torch.randn(3, 4))
    assert runs.found == [(torch_compat.compile_call(compiled), inner)]


def test_running_call_where_nothing_compiled_runs() -> None:
    assert torch_compat.running_call() == (None, None)


def test_subject_of() -> None:
    model = nn.Linear(4, 2)
    assert torch_compat.subject_of(torch.compile(model)) is model
    assert torch_compat.subject_of(torch.compile(Seen._site)) is Seen._site
    assert torch_compat.subject_of(model) is model


def test_fork_keeps_what_autograd_reads() -> None:
    seen = Seen()
    torch.compile(Outer(), backend=seen)(torch.randn(3, 4))
    for gm, copy, (metas, meta) in zip(seen.graphs, seen.forks, seen.metas, strict=True):
        assert str(copy.graph) == str(gm.graph)
        assert copy.meta == meta
        assert copy._param_name_to_source == gm._param_name_to_source  # type: ignore[attr-defined]
        for one, other, kept in zip(gm.graph.nodes, copy.graph.nodes, metas, strict=True):
            assert one is not other
            assert other.meta.keys() == kept.keys()
            assert all(other.meta[key] is kept[key] for key in ("grapharg", "example_value") if key in kept)
            assert getattr(one, "_dynamo_source", None) == getattr(other, "_dynamo_source", None)
    placeholders = [node for gm in seen.forks for node in gm.graph.find_nodes(op="placeholder")]
    assert any(getattr(node, "_dynamo_source", None) for node in placeholders)


def test_edits_of_a_fork_do_not_reach_the_original() -> None:
    seen = Seen()
    torch.compile(nn.Linear(4, 2), backend=seen)(torch.randn(3, 4))
    gm, copy = seen.graphs[0], seen.forks[0]
    before = str(gm.graph)
    for node in copy.graph.nodes:
        node.meta["custom"] = {"mark": 1}
    copy.meta["mark"] = 1
    copy.graph.erase_node(next(iter(copy.graph.find_nodes(op="output"))))
    assert str(gm.graph) == before
    assert "mark" not in gm.meta
    assert not any("custom" in node.meta and "mark" in node.meta["custom"] for node in gm.graph.nodes)


def test_parameters_of_and_name_modules_spell_from_the_root() -> None:
    seen = Seen()
    torch.compile(Outer(), backend=seen)(torch.randn(3, 4))
    names, paths = set(), set()
    for gm, site in zip(seen.forks, seen.sites, strict=True):
        torch_compat.name_modules(gm, site.locals)
        names |= set(parameters_of(gm, site.locals).values())
        paths |= {module_path(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert names == {"inner.layers.0.weight", "inner.layers.0.bias", "inner.scale", "out.weight", "out.bias"}
    assert paths == {"inner.layers.0", "inner", "out"}


def test_parameters_of_a_function_have_their_variables_names() -> None:
    seen, weight = Seen(), nn.Parameter(torch.ones(3))

    def scale(x: Tensor, offset: Tensor) -> Tensor:
        return x * weight + offset

    torch.compile(scale, backend=seen)(torch.randn(3), nn.Parameter(torch.ones(3)))
    assert set(parameters_of(seen.forks[0], {}).values()) == {"weight", "offset"}


class Adds:
    """A backend that gives the graph one input more and compiles it by AOTAutograd."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.graphs: list[fx.GraphModule] = []
        self.joints: list[fx.GraphModule] = []
        self.example: Tensor | None = None

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = torch_compat.fork(gm)
        self.example = torch_compat.add_input(graph, "added", self.value)
        self.graphs += [gm, graph]

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            self.joints.append(joint)
            return default_partition(joint, joint_inputs, **kwargs)

        def run(graph: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        compiled = aot_autograd(fw_compiler=run, partition_fn=partition)(graph, [*inputs, self.example])
        return lambda *args: compiled(*args, self.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_add_input(dynamic: bool) -> None:
    adds, layer = Adds(torch.zeros(3, requires_grad=True)), nn.Linear(4, 2)
    x = torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(layer, backend=adds, dynamic=dynamic)
    y = compiled(x)
    y.sum().backward()
    # AOTAutograd took the input: the joint graph has it, last of the primals, at its size and unread.
    gm, graph = adds.graphs
    count = len(gm.graph.find_nodes(op="placeholder"))
    placeholders = graph.graph.find_nodes(op="placeholder")
    assert [node.name for node in placeholders][count:] == ["added"]
    (joint,) = adds.joints
    (added,) = [n for n in joint.graph.find_nodes(op="placeholder") if getattr(n.meta["desc"], "idx", None) == count]
    assert not added.users
    size = added.meta["val"].shape[0]
    assert isinstance(size, int)
    assert size == 3
    # What it computes is what it computed.
    assert torch.equal(y, layer(x))
    assert torch.equal(x.grad, layer.weight.detach().sum(0).expand(5, 4))
    assert adds.value.grad is None


def test_the_example_of_an_added_input_is_fake_in_the_mode_that_autograd_traces_with() -> None:
    adds = Adds(torch.ones(()))
    torch.compile(lambda x: x * 2, backend=adds, dynamic=True)(torch.randn(5, requires_grad=True))
    assert isinstance(adds.example, FakeTensor)
    assert (adds.example.dtype, tuple(adds.example.shape)) == (torch.float32, ())
    values = [node.meta["val"] for node in adds.joints[0].graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    assert len(modes) >= 3
    assert all(mode is adds.example.fake_mode for mode in modes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_added_input_that_needs_a_gradient_has_a_place_for_it(requires_grad: bool) -> None:
    adds = Adds(torch.zeros(3, requires_grad=requires_grad))
    torch.compile(lambda x: x.sin(), backend=adds)(torch.randn(5, requires_grad=True))
    (output,) = adds.joints[0].graph.find_nodes(op="output")
    places = [getattr(getattr(desc, "grad_of", None), "idx", None) for desc in output.meta["desc"]]
    assert (1 in places) == requires_grad
    assert output.args[0][-1] is None


def test_tracing_without_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with torch_compat.tracing_without_autocast(forward=True):
            assert torch_compat.enabled_autocasts() == []
            assert torch._functorch.config.backward_pass_autocast == "off"
        with torch_compat.tracing_without_autocast(forward=False):
            assert torch_compat.enabled_autocasts() == ["cpu"]
            assert torch._functorch.config.backward_pass_autocast == "off"
        assert torch_compat.enabled_autocasts() == ["cpu"]
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward"


def test_enabled_autocasts() -> None:
    assert torch_compat.enabled_autocasts() == []
    with torch.autocast("cpu", torch.float16):
        assert torch_compat.enabled_autocasts() == ["cpu"]
        with torch.autocast("cpu", enabled=False):
            assert torch_compat.enabled_autocasts() == []


def test_running_without_autocast() -> None:
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with torch_compat.running_without_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_exceptions_that_fall_back() -> None:
    kinds = torch_compat.exceptions_that_fall_back()
    assert kinds
    assert all(issubclass(kind, Exception) for kind in kinds)

    def failing(gm: fx.GraphModule, inputs: Any) -> Any:
        raise kinds[0].__new__(kinds[0])

    # Dynamo swallows it and runs eagerly.
    assert torch.equal(torch.compile(lambda x: x + 1, backend=failing)(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("allowed", [True, False])
def test_captures_recurrent_modules(allowed: bool) -> None:
    seen = Seen()
    with torch._dynamo.config.patch(allow_rnn=allowed):
        assert torch_compat.captures_recurrent_modules() is allowed
        torch.compile(nn.GRU(4, 4), backend=seen)(torch.randn(2, 1, 4))
    assert bool(seen.graphs) is allowed
