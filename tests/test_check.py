"""Option ``check`` and ``find_nonfinite``: the first value that is not finite is named, with a way out."""

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import mpcompile
from mpcompile import MixprecError, MixprecWarning
from mpcompile.backend import mixprec
from mpcompile.options import Options
from tests.analysis_tools import EpsilonVanishes, GradientOverflows, Mlp, Overflows, build
from tests.helpers import Net

CHECKED = {"dtype": "fp16", "check": True}


def test_an_overflow_in_forward_raises_with_the_way_out() -> None:
    model, x = build(Mlp, Overflows)
    compiled = torch.compile(model, backend="mixprec", options=CHECKED)
    with pytest.raises(MixprecError) as error:
        compiled(x)
    text = str(error.value)
    assert "The first value of forward that is not finite" in text
    assert "the rounding to float16 for addmm in planted.down (analysis_tools.py:" in text
    assert "In fp32 it is finite" in text
    assert "options={'fp32': ['planted.down']}" in text


def test_an_overflow_in_backward_leaves_the_step_to_be_skipped() -> None:
    model, x = build(Mlp, GradientOverflows)
    compiled = torch.compile(model, backend="mixprec", options=CHECKED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = mpcompile.runtime(compiled)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.warns(MixprecWarning, match=r"mm in planted\.inner .*(\n.*)*the optimizer step is skipped"):
        compiled(x).square().mean().backward()
    optimizer.step()
    assert runtime.last_step_skipped
    assert runtime.first_nonfinite.module == "planted.inner"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_of_several_graphs_the_one_that_overflowed_is_named_and_each_step_anew() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x.relu())

    model = Broken()
    compiled = torch.compile(model, backend="mixprec", options=CHECKED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime, found = mpcompile.runtime(compiled), []
    for _ in range(2):
        with pytest.warns(MixprecWarning) as warned:
            (compiled(torch.randn(3, 4)).square().mean() * 1e30).backward()
        assert len([one for one in warned if one.category is MixprecWarning]) == 1
        found.append(runtime.first_nonfinite)
        optimizer.step()
        optimizer.zero_grad()
    assert [each.module for each in found] == ["last", "last"]
    assert found[0] is not found[1]


@pytest.mark.parametrize("scale", [2.0**16, {"init_scale": 2.0**16, "floor": 2.0**16}], ids=["static", "at its floor"])
def test_without_a_scale_that_falls_backward_raises(scale: object) -> None:
    model, x = build(Mlp, GradientOverflows)
    compiled = torch.compile(model, backend="mixprec", options={**CHECKED, "loss_scale": scale})
    with pytest.raises(MixprecError, match=r"planted\.inner"):
        compiled(x).square().mean().backward()


def test_what_was_rounded_before_is_said() -> None:
    model, x = build(Mlp, EpsilonVanishes)
    compiled = torch.compile(model, backend="mixprec", options={"dtype": "bf16", "check": True})
    with pytest.raises(MixprecError, match=r"(?s)rsqrt in planted .*What it reads was rounded to 16 bits before"):
        compiled(x)


def test_checked_training_is_the_reference_bit_by_bit() -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    x = torch.randn(32, 8)
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        model = Normed()
        options = {"dtype": "bf16", "check": check, "compiler": "reference"}
        output = torch.compile(model, backend="mixprec", options=options)(x)
        output.square().mean().backward()
        found.append([output, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_infinity_that_a_mask_removes_is_no_fault() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x).masked_fill(x > 0, -torch.inf)
            scores = torch.cat([scores, scores.new_zeros(len(x), 1)], 1)
            return scores.softmax(-1) + torch.where(x[:, :1] > 0, x[:, :1].log(), 0.0)

    model, x = Masked(), torch.randn(16, 8)
    x[0, 0] = 0  # its logarithm is infinite, and thrown away
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend="mixprec", options=CHECKED)(x)
    assert mpcompile.find_nonfinite(model, x, options={"dtype": "fp16"}) is None


def test_an_input_that_is_not_finite_is_named() -> None:
    model, x = Net(), torch.randn(4, 8)
    x[1, 2] = torch.nan
    found = mpcompile.find_nonfinite(model, x, options={"dtype": "bf16"})
    assert found is not None
    assert (found.op, found.what, found.elements) == ("placeholder", "nan", 1)
    assert "is not finite already (1 of 32 elements nan)" in str(found)
    with torch.no_grad():
        model.first.bias[0] = torch.inf
    x[1, 2] = 0
    found = mpcompile.find_nonfinite(model, x, options={"dtype": "bf16"})
    assert found is not None
    assert found.name == "first.bias"


def test_what_overflows_in_fp32_too_has_no_rule() -> None:
    class Explodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * 1e6).exp()

    found = mpcompile.find_nonfinite(Explodes(), torch.randn(4, 8), options={"dtype": "bf16"})
    assert found is not None
    assert (found.user_op, found.finite_in_fp32, found.rule) == ("aten.exp.default", False, "")
    assert "not finite in fp32 either" in str(found)


def test_a_gradient_that_is_not_finite_where_it_enters() -> None:
    found = mpcompile.find_nonfinite(
        Net(), torch.randn(4, 8), options={"dtype": "bf16"}, loss=lambda y: (y * torch.inf).sum()
    )
    assert found is not None
    assert (found.op, found.direction) == ("placeholder", "backward")


def test_settings_of_generated_code_contradict_it() -> None:
    with pytest.raises(ValueError, match="contradicts option `inductor`"):
        Options.parse({"check": True, "inductor": {"cpp_wrapper": True}})
    compiled = torch.compile(Net(), backend=functools.partial(mixprec, mode="max-autotune", options=CHECKED))
    with pytest.raises(BackendCompilerFailed, match="contradicts mode='max-autotune'"):
        compiled(torch.randn(4, 8))
