"""``explain`` reports what compiling would do, and leaves no trace on the model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import mpcompile
from tests.test_programs import mixprec

BF16 = {"dtype": "bf16"}


class Net(nn.Module):
    """Has buffers that a forward changes, and dropout that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.drop(self.norm(self.layer(x))) * scale


def test_buffers_gradients_and_random_state_are_untouched() -> None:
    model, x = Net(), torch.randn(4, 8)
    model.layer.weight.grad = torch.ones(8, 8)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    mpcompile.explain(model, x, options=BF16)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model.layer.weight.grad, torch.ones(8, 8))
    assert model.layer.bias.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None


def test_it_reports_what_compiling_reports() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = mixprec(model, fp32=["op:add"])
    compiled(x)
    (report,) = mpcompile.reports(compiled)
    explained = mpcompile.explain(model, x, options={**BF16, "fp32": ["op:add"]})
    assert explained.graphs == report.graphs
    assert explained.dtype == "bfloat16"


def test_backward_is_reported_for_inputs_that_need_no_gradient() -> None:
    report = mpcompile.explain(Net(), torch.randn(4, 8), options=BF16)
    assert {node.direction for node in report.matmuls()} == {"forward", "backward"}


def test_asking_twice_gives_the_same_answer() -> None:
    model, x = Net(), torch.randn(4, 8)
    first = mpcompile.explain(model, x, options=BF16)
    assert mpcompile.explain(model, x, options=BF16) == first
    assert len(first.graphs) == 1


def test_keyword_arguments_and_a_plain_function() -> None:
    w = nn.Parameter(torch.randn(8, 4))

    def product(x: Tensor, *, scale: float) -> Tensor:
        return (x * scale) @ w

    for _ in range(2):
        report = mpcompile.explain(product, torch.randn(3, 8), scale=2.0, options=BF16)
        assert [node.precision for node in report.matmuls()] == ["low", "low"]
    assert w.grad is None


def test_graphs_of_all_parts_are_in_one_report() -> None:
    class Broken(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = self.layer(x)
            torch._dynamo.graph_break()
            return self.layer(x)

    report = mpcompile.explain(Broken(), torch.randn(4, 8), options=BF16)
    assert len(report.graphs) == len(report.modules) == 2
    assert [node.op for node in report.matmuls() if node.direction == "forward"] == ["aten.addmm.default"] * 2


def test_options_of_the_code_generator_do_not_matter() -> None:
    options: dict[str, Any] = {**BF16, "compiler": "inductor", "inductor": {"max_autotune": True}}
    assert mpcompile.explain(Net(), torch.randn(4, 8), options=options).dtype == "bfloat16"


def test_it_raises_what_compiling_raises() -> None:
    with pytest.raises(BackendCompilerFailed, match="Rule 'heads' matches no module"):
        mpcompile.explain(Net(), torch.randn(4, 8), options={**BF16, "fp32": ["heads"]})


def test_a_model_of_which_nothing_is_captured_raises() -> None:
    @torch.compiler.disable
    def opaque(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(mpcompile.MixprecError, match="captured no graph"):
        mpcompile.explain(lambda x: opaque(x), torch.randn(3), options=BF16)


def test_a_model_of_torch_modules_alone_names_no_line_of_ours() -> None:
    report = mpcompile.explain(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), options=BF16)
    assert {node.source for node in report.nodes} == {""}


def test_functions_are_explained_as_often_as_one_likes() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    for _ in range(10):  # torch stops compiling one function after 8 versions
        report = mpcompile.explain(lambda x: x @ weight, torch.randn(4, 8), options=BF16)
        assert len(report.matmuls()) == 2
