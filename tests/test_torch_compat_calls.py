"""Private names of torch that tell which call compiles or runs: each test fails when torch moves one."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mpcompile import torch_compat
from mpcompile.torch_compat import Site
from tests.torch_compat_tools import Outer, Seen


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
