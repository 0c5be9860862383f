"""An autocast that is on around a compiled model: one warning, dtypes as in eager mode, mixprec decides inside."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile.notices import MixprecWarning
from mpcompile.torch_compat import enabled_autocasts
from tests.test_programs import matmuls, mixprec

pytestmark = pytest.mark.filterwarnings("ignore:torch.autocast is active:mpcompile.notices.MixprecWarning")


class Net(nn.Module):
    """Returns a matmul's result, a sum of it, its softmax and an integer: autocast gives each its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.a(x).relu()
        out = self.b(hidden)
        return out, hidden, out.softmax(-1), out.sum(), out.argmax(-1), x * 2


def autocast(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtypes_that_eager_autocast_gives(dtype: torch.dtype) -> None:
    model, x = Net(), torch.randn(3, 8)
    compiled = mixprec(model)
    with autocast(dtype):
        expected = [value.dtype for value in model(x)]
        found = compiled(x)
    assert [value.dtype for value in found] == expected
    assert expected[0] is dtype


def test_mixprec_decides_inside() -> None:
    compiled = mixprec(Net(), fp32=["b"])
    with autocast():
        compiled(torch.randn(3, 8))[0].float().sum().backward()
    read = {(node.module, dtype) for node in matmuls(compiled) for dtype in node.inputs}
    assert read == {("a", "bfloat16"), ("b", "float32")}


def test_a_model_kept_in_fp32_by_rule_computes_what_fp32_computes() -> None:
    model, x = Net(), torch.randn(3, 8)
    compiled = mixprec(model, fp32=["b"])
    with autocast():
        out, hidden, *_ = compiled(x)
    plain, plain_hidden, *_ = mixprec(model, fp32=["b"], compiler="reference")(x)
    assert torch.equal(hidden, plain_hidden.to(hidden.dtype))
    assert torch.equal(out, plain.to(out.dtype))


def test_gradients_are_fp32_and_the_same_as_without() -> None:
    model, x = Net(), torch.randn(3, 8)
    mixprec(model)(x)[3].backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with autocast():
        loss = mixprec(model)(x)[3]
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {value.dtype for value in found} == {torch.float32}


@pytest.mark.filterwarnings("default")
def test_it_warns_once_for_a_model() -> None:
    compiled = mixprec(Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with autocast():
            for _ in range(3):
                compiled(torch.randn(3, 8))
    assert [w.category for w in caught].count(MixprecWarning) == 1


def test_every_call_under_autocast_gives_the_same() -> None:
    compiled, x = mixprec(Net()), torch.randn(3, 8)
    with autocast():
        first, second = compiled(x), compiled(x)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_autocast_is_as_it_was_after_a_call() -> None:
    compiled = mixprec(Net())
    with autocast(torch.float16):
        for _ in range(2):
            compiled(torch.randn(3, 8))
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.float16
            assert torch.mm(torch.randn(2, 2), torch.randn(2, 2)).dtype is torch.float16
    assert enabled_autocasts() == []


def test_a_region_inside_the_model_says_which_type_is_low_there() -> None:
    class Region(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with torch.autocast("cpu", torch.float16):
                x = self.b(x)
            return x.float()

    compiled = mixprec(Region())
    compiled(torch.randn(3, 8)).sum().backward()
    read = {(node.module, dtype) for node in matmuls(compiled) for dtype in node.inputs}
    assert read == {("a", "bfloat16"), ("b", "float16")}


def test_an_island_inside_is_fp32_in_backward_too() -> None:
    class Island(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.b(self.a(x).float())

    compiled = mixprec(Island(), fp32=["a"])
    with autocast(), pytest.warns(MixprecWarning, match="autocast is active"):
        compiled(torch.randn(3, 8)).sum().backward()
    assert {dtype for node in matmuls(compiled) for dtype in node.inputs} == {"float32"}


class Speaking(Net):
    """Asks for another value's dtype, which is 16-bit under autocast."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.a(x)
        return hidden, self.b(x.to(hidden.dtype)), x.to(torch.bfloat16) + 1


def test_a_graph_that_speaks_of_16_bit_types_is_consistent() -> None:
    model, x = Speaking(), torch.randn(3, 8)
    compiled = mixprec(model)
    with autocast():
        expected = [value.dtype for value in model(x)]
        found = compiled(x)
        found[1].float().sum().backward()
    assert [value.dtype for value in found] == expected
    assert model.b.weight.grad is not None
    assert model.b.weight.grad.dtype is torch.float32


def test_the_backward_of_an_island_does_not_inherit_an_autocast_that_is_kept() -> None:
    class Island(Speaking):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", enabled=False):
                inside = self.b(x)
            return inside, self.a(x), x.to(torch.bfloat16) + 1

    compiled = mixprec(Island())
    with autocast():
        compiled(torch.randn(3, 8))[0].sum().backward()
    island = [node for node in matmuls(compiled) if node.module == "b"]
    assert {node.direction for node in island} == {"forward", "backward"}
    assert {dtype for node in island for dtype in node.inputs} == {"float32"}


def test_reports_are_there() -> None:
    compiled = mixprec(Net())
    with autocast():
        compiled(torch.randn(3, 8))
    assert len(mpcompile.reports(compiled)) == 1
