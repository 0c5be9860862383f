"""Programs that do something of their own with autograd, aliasing or mutation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.test_programs import BOUND, assert_close, check, error, in_fp64, low_matmuls, matmuls, mixprec, step


class Odd(torch.autograd.Function):
    """A matmul whose backward is wrong on purpose: nobody may replace it by the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 7 * gradient @ weight.t(), x.t() @ gradient - 3


class UsesOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Odd.apply(self.norm(x), self.weight)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_backward_of_a_function_is_kept() -> None:
    model = UsesOdd()
    check(model, torch.randn(4, 8, requires_grad=True), low=(1, 2))
    assert model.weight.grad.mean() < -2


class Straight(torch.autograd.Function):
    """Rounds in forward, passes the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Binarised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Straight.apply(self.first(x) + 4 * x.sign()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_straight_through_estimator() -> None:
    check(Binarised(), torch.randn(4, 8), low=(2, 3))


class PerSample(nn.Module):
    """Gradients of every sample, by vmap over func.grad, through a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found = torch.func.functional_call(self.layers, parameters, (x,))
        return F.mse_loss(found, y)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        parameters = {name: p.detach() for name, p in self.layers.named_parameters()}
        return torch.vmap(torch.func.grad(self.loss), in_dims=(None, 0, 0))(parameters, x, y)


def test_per_sample_gradients() -> None:
    model, x, y = PerSample(), torch.randn(5, 8), torch.randn(5, 1)
    exact = in_fp64(model)
    compiled = mixprec(model)
    found, truth = compiled(x, y), exact(x.double(), y.double())
    assert error(list(found.values()), list(truth.values())) < BOUND
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert low_matmuls(compiled)[0] >= 2


class Called(nn.Module):
    """``functional_call`` with weights made on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.inner.weight * self.scale, "bias": self.inner.bias}
        return torch.func.functional_call(self.inner, weights, (x,))


def test_functional_call() -> None:
    check(Called(), torch.randn(4, 8, requires_grad=True), low=(1, 2))


@torch.library.custom_op("mixprec_test::opaque", mutates_args=())
def opaque(x: Tensor, weight: Tensor) -> Tensor:
    seen.append((x.dtype, weight.dtype))
    return x @ weight


seen: list[tuple[torch.dtype, torch.dtype]] = []


@opaque.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


opaque.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class UsesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(opaque(self.before(x), self.weight))


def test_custom_operator_sees_what_was_traced() -> None:
    # Backward: its registered formula has two matmuls, which are matmuls as any others.
    compiled = check(UsesOpaque(), torch.randn(4, 8), low=(2, 5))
    assert set(seen) == {(torch.float64,) * 2, (torch.float32,) * 2}
    (node,) = [n for r in mpcompile.reports(compiled) for n in r.nodes if "opaque" in n.op]
    assert (node.inputs, node.output, node.op_class) == (("float32",) * 2, "float32", "opaque")


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.embedding(ids))), ids.roll(1))


def test_tied_weights() -> None:
    model = Tied()
    compiled = check(model, torch.randint(0, 11, (6,)), low=(1, 2))
    assert model.head.weight is model.embedding.weight
    (report,) = mpcompile.reports(compiled)
    narrowed = [cast.parameter for cast in report.casts if cast.after == "bfloat16" and cast.parameter]
    assert len(narrowed) == len(set(narrowed)) == 1


class Recycled(nn.Module):
    """Passes without gradient, then one with: the weights are narrowed once and keep their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(2):
                state = torch.tanh(self.layer(x + state))
        return self.layer(x + state)


def test_recycling() -> None:
    check(Recycled(), torch.randn(4, 8), low=(3, 1))


class Outputs(nn.Module):
    """Every kind of thing a forward may return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y, y.view(-1), y.t(), x, x[1:], self.layer.weight, y.detach(), y > 0, y.shape[0], y.argmax(), None, True


def test_outputs_alias_as_in_eager() -> None:
    model, x = Outputs(), torch.randn(4, 8)
    compiled = check(model, x, low=(1, 1))
    found, eager = compiled(x), model(x)
    y, flat, transposed, same, rest, weight, detached = found[:7]
    assert {flat.data_ptr(), transposed.data_ptr()} == {y.data_ptr()}
    assert same is x
    assert rest.data_ptr() == x[1:].data_ptr()
    assert weight is model.layer.weight
    assert detached.grad_fn is None
    assert (found[8], *found[10:]) == (4, None, True)
    for one, other in zip(found, eager, strict=True):
        if isinstance(other, Tensor):
            assert one.requires_grad == other.requires_grad
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())


class Mutates(nn.Module):
    """Writes into its input and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        y = self.layer(x + 1)
        count.add_(1)
        x.mul_(2)
        self.total.add_(y.detach().sum(0))
        return y.relu_() * 3 + x


def test_mutated_inputs_and_buffers() -> None:
    model, x, count = Mutates(), torch.randn(4, 8), torch.zeros(3, dtype=torch.long)
    exact = in_fp64(model)
    compiled = mixprec(model)
    mine, truth = x.clone(), x.double()
    for _ in range(2):
        found, expected = compiled(mine, count), exact(truth, count.clone())
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(mine, 4 * x)
    assert torch.equal(count, torch.full((3,), 2))
    assert error([found.detach()], [expected.detach()]) < BOUND
    assert error([model.total], [exact.total]) < BOUND
    assert error([model.layer.weight.grad], [exact.layer.weight.grad]) < BOUND


def test_second_backward_over_a_retained_graph() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    loss = mixprec(model)(x).square().mean()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert error([p.grad for p in model.parameters()], [2 * g for g in once]) < 1e-6
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_accumulate_in_fp32() -> None:
    model, x = nn.Linear(8, 8), torch.ones(1, 8)
    compiled = mixprec(model)
    x = torch.ones(2, 8)
    for _ in range(600):  # a sum in bf16 would stick at 256
        compiled(x).sum().mul(0.5).backward()
    assert torch.equal(model.weight.grad, torch.full((8, 8), 600.0))
    assert torch.equal(model.bias.grad, torch.full((8,), 600.0))


def test_double_backward_raises_the_error_of_torch() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixprec(model)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


def test_gradient_taken_inside() -> None:
    def penalty(x: Tensor, weight: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda x: (x @ weight).sin().sum())(x)
        return gradient.square().sum()

    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    compiled = check(penalty, x, weight, low=(2, 3))
    assert_close(step(compiled, penalty, [x, weight]), step(penalty, penalty, [x.double(), in_fp64(weight)]))
    assert all("bfloat16" in node.inputs for node in matmuls(compiled))
