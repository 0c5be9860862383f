"""``compare``: what it runs, what it leaves alone, and how its result reads."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile import Comparison, MixprecError
from tests.analysis_tools import only_in
from tests.helpers import Net, relative_error

BF16 = {"dtype": "bf16"}


class Normed(nn.Module):
    """Batch norm, dropout and a frozen layer: buffers that change, random numbers, a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.5)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


@pytest.fixture(scope="module")
def normed() -> Comparison:
    torch.manual_seed(0)
    return mpcompile.compare(Normed(), torch.randn(32, 16), options={"dtype": "fp16"})


class WithLoss(nn.Module):
    """A model that returns its loss, so that everything is in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def test_errors_of_gradients_are_those_of_training() -> None:
    model, wide, x = WithLoss(), WithLoss().double(), torch.randn(64, 8)
    wide.load_state_dict(model.state_dict())
    found = mpcompile.compare(model, x, options=BF16)
    loss = wide(x.double())
    loss.backward()
    compiled = torch.compile(model, backend="mixprec", options={**BF16, "compiler": "reference"})
    compiled(x).backward()
    truth = {name: parameter.grad for name, parameter in wide.named_parameters()}
    for gradient in found.gradients:
        trained, exact = dict(model.named_parameters())[gradient.name].grad, truth[gradient.name]
        assert trained is not None
        assert exact is not None
        assert gradient.size == pytest.approx(float(exact.norm()), rel=1e-9)
        assert gradient.error == pytest.approx(relative_error(trained, exact), rel=1e-6)
        assert gradient.error_fp32 < 1e-5
    assert len(found.gradients) == len(truth)
    assert found.outputs[0].size == pytest.approx(loss.item(), rel=1e-9)


def test_dropout_is_replayed_and_buffers_are_handled(normed: Comparison) -> None:
    # fp16 rounds to 2^-11 and the scale is exact: other random numbers in one of the runs would make errors near 1.
    assert normed.loss_scale == 2.0**16
    assert all(gradient.effective < 0.02 for gradient in normed.gradients)
    assert {g.name for g in normed.gradients} == {"first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert normed.attributed == pytest.approx(1, abs=0.2)


def test_a_gradient_that_is_zero_but_for_rounding_is_known_as_such(normed: Comparison) -> None:
    (bias,) = [gradient for gradient in normed.gradients if gradient.name == "first.bias"]  # in front of a batch norm
    assert bias.cancellation > 1e3
    assert bias.effective < 0.02
    assert "zero but for rounding" in str(normed)


def test_the_model_stays_as_it_is() -> None:
    model, x = Normed(), torch.randn(8, 16, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    mpcompile.compare(model, x, options=BF16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_gradients_there_is_only_a_forward() -> None:
    model = Net().eval()
    with torch.no_grad():
        found = mpcompile.compare(model, torch.randn(8, 8), options={"dtype": "fp16", "weight_cache": True})
    assert found.gradients == ()
    assert {node.direction for node in found.nodes} == {"forward"}
    assert found.error == pytest.approx(found.outputs[0].error, rel=1e-6)
    assert found.attributed == pytest.approx(1, abs=0.1)


def test_every_call_of_every_graph_is_compared() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(self.last(x))

    found = mpcompile.compare(Broken(), torch.randn(4, 8), options=BF16)
    assert {node.graph for node in found.nodes} == {0, 1}
    names = sorted((gradient.graph, gradient.name) for gradient in found.gradients)
    assert [n for n in names if "." in n[1]] == [
        (0, "first.bias"),
        (0, "first.weight"),
        (1, "last.bias"),
        (1, "last.weight"),
    ]
    assert found.attributed == pytest.approx(1, abs=0.1)


def test_the_loss_is_the_users() -> None:
    model, x, target = Net(), torch.randn(64, 8), torch.randint(4, (64,))
    found = mpcompile.compare(model, x, options=BF16, loss=lambda logits: F.cross_entropy(logits, target))
    model(x)
    F.cross_entropy(model(x), target).backward()
    sizes = {gradient.name: gradient.size for gradient in found.gradients}
    assert sizes["last.weight"] == pytest.approx(float(model.last.weight.grad.norm()), rel=0.02)  # type: ignore[union-attr]


def test_a_branch_is_one_operation() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda y: self.layer(y), lambda y: y * 2, (x,))

    for x in (torch.ones(4, 8) / 3, -torch.ones(4, 8)):
        found = mpcompile.compare(Branch(), x, options=BF16)
        (branch,) = [node for node in found.nodes if node.op == "cond" and node.direction == "forward"]
        assert (branch.introduced > 1e-4) == bool(x.sum() > 0)  # the other branch multiplies by two
        assert found.unmeasured == ()


def test_what_cannot_run_in_fp64_is_named() -> None:
    operator = only_in(torch.bfloat16)
    with torch.no_grad():
        found = mpcompile.compare(lambda x: operator(x.bfloat16()).float(), torch.randn(4, 8), options=BF16)
    (name,) = found.unmeasured
    assert name.startswith("only_bfloat16")
    assert Comparison.from_json(found.to_json()) == found
    assert "what it rounds is not seen: only_bfloat16" in str(found)


def test_a_function_and_keyword_arguments() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def double_product(x: Tensor, *, scale: Tensor) -> Tensor:
        return (x @ weight) * scale

    found = mpcompile.compare(double_product, torch.randn(4, 8), options=BF16, scale=torch.tensor(2.0))
    assert len(found.gradients) == 1
    assert weight.grad is None


def test_json_reads_back_equal(normed: Comparison) -> None:
    read = Comparison.from_json(normed.to_json())
    assert read == normed
    with pytest.raises(LookupError, match=r"call compare\(\) again"):
        read.contributions()


def test_json_holds_what_is_not_finite() -> None:
    found = mpcompile.compare(Net(), torch.randn(4, 8) * 1e6, options={"dtype": "fp16"})
    assert any(math.isinf(node.error) for node in found.nodes)
    assert Comparison.from_json(found.to_json()).to_json() == found.to_json()
    assert "NOT FINITE first in" in str(found)


def test_it_reads_well_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(mpcompile.compare(Net(), torch.randn(64, 8), options=BF16))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if " rounds " in line]
    assert any("last" in row and "helpers.py:" in row for row in rows)
    assert text.splitlines()[0].startswith("mixprec against fp64: bfloat16,")


def test_modules_roll_up_their_operations(normed: Comparison) -> None:
    total = sum(module.contribution + module.amplified for module in normed.modules())
    assert total == pytest.approx(sum(n.contribution + n.amplified for n in normed.nodes))
    assert sum(module.operations for module in normed.modules()) == len(normed.nodes)
    worst = normed.modules()[0]
    assert worst.worst in {node.name for node in normed.nodes if node.module == worst.module}


def test_ranges_are_those_of_the_low_type() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = Small()
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(4))
        found = mpcompile.compare(model, torch.tensor([[1e-9, 1e-6, 1.0, 1e6]]), options={"dtype": "fp16"})
    narrowed = next(node for node in found.nodes if node.dtype == "float16" and node.overflow)
    # 1e-9 rounds to zero, 1e-6 keeps fewer bits (both are below 2^-14), 1e6 is beyond 65504.
    assert (narrowed.underflow, narrowed.subnormal, narrowed.overflow) == (0.25, 0.5, 0.25)
    assert (narrowed.smallest, narrowed.largest) == (-30, 19)


def test_a_plot_needs_matplotlib_and_says_so(
    normed: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normed.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        normed.plot(tmp_path / "none.png")


def test_nothing_to_compare() -> None:
    with pytest.raises(MixprecError, match="the policy leaves this model in fp32"):
        mpcompile.compare(Net(), torch.randn(4, 8), options={"policy": "fp32"})
    with pytest.raises(ValueError, match="Did you mean 'dtype'"):
        mpcompile.compare(Net(), torch.randn(4, 8), options={"dtyp": "bf16"})
    with pytest.raises(ValueError, match="give `loss`"):
        mpcompile.compare(lambda x: x.argmax(), torch.randn(4, requires_grad=True), options=BF16)


def test_looking_does_not_use_up_the_users_compilations() -> None:
    model, x = Net(), torch.randn(4, 8)
    for _ in range(5):  # torch stops compiling one function after 8 versions
        mpcompile.compare(model, x, options=BF16)
        mpcompile.explain(model, x, options=BF16)
    compiled = torch.compile(model, backend="mixprec", options={**BF16, "compiler": "aot_eager"})
    compiled(x)
    assert len(mpcompile.reports(compiled)) == 1


def test_what_is_not_finite_has_an_infinite_error() -> None:
    model, x = Net(), torch.full((4, 8), 1e5)
    comparison = mpcompile.compare(model, x, options={"dtype": "fp16"})
    assert comparison.error == float("inf")
    assert mpcompile.Comparison.from_json(comparison.to_json()) == comparison
    assert "inf on average" in str(comparison)
