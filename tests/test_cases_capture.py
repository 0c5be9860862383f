"""What the user says about precision in the code, and an autocast around it, in every way torch captures them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from tests.test_programs import (
    BOUND,
    assert_close,
    check,
    error,
    fp32_matmuls,
    in_fp64,
    low_matmuls,
    matmuls,
    mixprec,
    step,
)


class Island(nn.Module):
    """A layer inside ``autocast(enabled=False)`` between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(x)
        with torch.autocast(x.device.type, enabled=False):
            inside = self.inside(x) * 3
        return self.after(inside), inside


def test_island_is_fp32_in_both_directions() -> None:
    model, x = Island(), torch.randn(4, 8)
    compiled = check(model, x, low=(2, 3))
    assert fp32_matmuls(compiled) == (1, 2)
    kept = {(n.module, n.rule, n.reason) for n in matmuls(compiled) if n.precision == "fp32"}
    assert kept == {("inside", "user", "inside autocast(enabled=False)")}


def test_island_reads_what_other_readers_round() -> None:
    class Shared(nn.Module):
        """A value that a low matmul and an fp32 island both read."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.sin().mul(1.01)
            with torch.autocast(x.device.type, enabled=False):
                inside = self.inside(y)
            return self.layer(y), inside

    model, x = Shared(), torch.randn(4, 8)
    found = mixprec(model)(x)[1].detach()
    assert error([found], [in_fp64(model)(x.double())[1].detach()]) < 1e-6


class Break(nn.Module):
    """A graph break inside a region of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            torch._dynamo.graph_break()
            x = self.second(x)
        assert x.dtype == torch.bfloat16
        return self.third(x.float())


def test_region_with_a_graph_break_ends_where_it_ends() -> None:
    model, x = Break(), torch.randn(4, 8)
    compiled = mixprec(model)
    mixed = step(compiled, model, [x])
    layers = in_fp64(model)
    exact = layers.third(layers.second(layers.first(x.double())))
    assert error(mixed.outputs, [exact.detach()]) < BOUND
    assert mixed.outputs[0].dtype == torch.float32
    assert {gradient.dtype for gradient in mixed.gradients} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@contextmanager
def ambient_is_noticed() -> Iterator[None]:
    """Every warning must be the one about an ambient autocast."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    mine = [str(w.message) for w in caught if issubclass(w.category, mpcompile.MixprecWarning)]
    assert mine
    assert all("torch.autocast is active" in message for message in mine)


def test_ambient_autocast_comes_and_goes() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)
    compiled = mixprec(model)
    exact = in_fp64(model)
    truth = step(exact, exact, [x.double()])
    without = step(compiled, model, [x])
    with torch.autocast("cpu", torch.bfloat16), ambient_is_noticed():
        inside = step(compiled, model, [x])
    again = step(compiled, model, [x])
    assert_close(without, truth)
    assert_close(inside, truth)
    assert error(again.outputs + again.gradients, without.outputs + without.gradients) == 0
    assert {gradient.dtype for gradient in inside.gradients} == {torch.float32}
    # The widest rounding is that of the output, which Dynamo traced as bf16 under autocast.
    assert error(inside.outputs, without.outputs) < 2**-8


def test_ambient_autocast_does_not_reach_backward() -> None:
    model, x = Island(), torch.randn(4, 8)
    compiled = mixprec(model)
    with torch.autocast("cpu", torch.bfloat16):
        with ambient_is_noticed():
            y, _ = compiled(x)
        y.float().sum().backward()
    assert [n.module for n in matmuls(compiled) if "bfloat16" not in n.inputs] == ["inside"] * 3


def test_dynamic_sizes_under_autocast() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
    exact = in_fp64(model)
    compiled = mixprec(model, dynamic=True)
    with torch.autocast("cpu", torch.bfloat16), ambient_is_noticed():
        for rows in (3, 7):
            x = torch.randn(rows, 8)
            assert_close(step(compiled, model, [x]), step(exact, exact, [x.double()]), 0.03)
    assert len(mpcompile.reports(compiled)) == 1


ROUTERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "float() of both": (lambda x, w: x.float() @ w.float(), True),
    "to() of both, transposed": (lambda x, w: x.to(torch.float32) @ w.t().to(torch.float32).t(), True),
    "float() of both, reshaped": (lambda x, w: x.float().view(2, 2, 8) @ w.float(), True),
    "float() of one": (lambda x, w: x.float() @ w, False),
    "to the weight's dtype": (lambda x, w: x.to(w.dtype) @ w, False),
}


@pytest.mark.parametrize("how", ROUTERS)
def test_request_for_fp32_holds_where_all_operands_ask(how: str) -> None:
    function, kept = ROUTERS[how]

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x), self.weight)

    model, x = Router(), torch.randn(4, 8)
    compiled = mixprec(model)
    compiled(x).sum().backward()
    assert fp32_matmuls(compiled) == ((1, 2) if kept else (0, 0))
    assert low_matmuls(compiled) == ((1, 1) if kept else (2, 3))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export's own
def test_composites_kept_and_decomposed_agree() -> None:
    class Composite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)).softmax(-1)

    model, x = Composite(), torch.randn(4, 8)
    program = torch.export.export(model, (x,))
    found = []
    for exported in (program, program.run_decompositions()):
        gm = exported.graph_module
        mpcompile.passes.run_passes(gm, mpcompile.Policy(dtype=torch.bfloat16))
        found.append(exported.module()(x).detach())
        linear = [
            n for n in gm.graph.nodes if n.target in (torch.ops.aten.linear.default, torch.ops.aten.addmm.default)
        ]
        assert [n.meta["val"].dtype for n in linear] == [torch.bfloat16]
    assert error([found[0]], [in_fp64(model)(x.double()).detach()]) < BOUND
    assert error([found[0]], [found[1]]) < 1e-5


class Unseen(nn.Module):
    """Only a recurrent module: Dynamo gives no graph to any backend."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.recurrent(x)[0]


def test_model_without_any_graph_is_no_success() -> None:
    model, x = Unseen(), torch.randn(3, 2, 4)
    compiled = mixprec(model)
    assert torch.equal(compiled(x), model(x))
    assert mpcompile.reports(compiled) == []
    with pytest.raises(mpcompile.MixprecError):
        mpcompile.explain(model, x, options={"dtype": "bf16"})


def test_recurrent_module_captured_on_request_runs_low() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        # All steps share one projection of the input; the first state needs no gradient.
        compiled = check(Unseen(), torch.randn(2, 3, 4), low=(3, 4))
    assert fp32_matmuls(compiled) == (0, 0)
