"""Backward in fp16 of every kind and of every loss scale: custom, repeated, interleaved, tiny, over DTensors."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mpcompile
from tests.helpers import relative_error
from tests.test_programs import in_fp64, step
from tests.test_programs_fp16 import (
    BOUND,
    SCALES,
    TOO_LARGE,
    Two,
    assert_close,
    check_scales,
    fp16,
    graphs,
    set_scale,
    small,
    tensors,
)


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    counters.clear()


class Custom(torch.autograd.Function):
    """Passes its input on; what backward does with the gradient is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return BACKWARDS[ctx.how](gradient), None


BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda g: g.clamp(-0.1, 0.1),
    "sign": lambda g: g.sign() * 0.5,
    "constant": lambda g: g + 0.1,
    "only a constant": lambda g: torch.ones_like(g) * 0.5,
    "square": lambda g: g * g * 2,
    "normalise": lambda g: g / (g.norm() + 1e-6),
    "branches": lambda g: torch.where(g > 0, g, g * 0.1),
    "mean size added": lambda g: g + g.abs().mean(),
}


class UsesCustom(Two):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Custom.apply(self.first(x), self.how))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("how", BACKWARDS)
def test_backward_that_is_not_linear_sees_true_gradients(how: str) -> None:
    check_scales(UsesCustom(how), torch.randn(4, 8, requires_grad=True))


def test_sizes_that_change_compile_once() -> None:
    model = Two()
    exact, compiled = in_fp64(model), fp16(model, dynamic=True)
    for scale, batch in zip((*SCALES, *SCALES), (3, 5, 5, 3), strict=True):
        set_scale(compiled, scale)
        x = torch.randn(batch, 8, requires_grad=True)
        assert_close(step(small(compiled), model, [x]), step(small(exact), exact, [in_fp64(x)]))
    assert graphs() == 1


def test_one_compilation_for_each_static_scale_and_equal_bits() -> None:
    model, x = Two(), torch.randn(4, 8, requires_grad=True)
    found = []
    for scale in SCALES:
        compiled = fp16(model, scale)
        found += [step(small(compiled), model, [x]) for _ in range(2)]
        assert mpcompile.runtime(compiled).scale == scale
    assert graphs() == 2
    for other in found[1:]:
        assert all(map(torch.equal, tensors(found[0]), tensors(other)))


def test_moving_scale_compiles_nothing() -> None:
    model, x = Two(), torch.randn(4, 8)
    compiled = fp16(model, {"init_scale": 2.0**24, "growth_interval": 1})
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=1e-3), mpcompile.runtime(compiled)
    seen = []
    for _ in range(14):
        seen.append(runtime.scale)
        optimizer.zero_grad()
        compiled(x).sum().backward()
        optimizer.step()
    assert len(set(seen)) > 6
    assert max(map(seen.count, seen)) > 1  # it fell, and grew again
    assert graphs() == 1


def test_two_models_have_a_scale_each() -> None:
    first, second = Two(), Two()  # of one structure: Dynamo may run the code of either for both
    x = torch.randn(4, 8, requires_grad=True)
    both = nn.ModuleList([first, second])
    exact = in_fp64(both)
    one, other = fp16(first), fp16(second)
    truth = step(small(lambda x: exact[1](exact[0](x))), exact, [in_fp64(x)])
    found = []
    for scales in (SCALES, SCALES[::-1]):
        set_scale(one, scales[0])
        set_scale(other, scales[1])
        found.append(step(small(lambda x: other(one(x))), both, [x]))
    assert_close(found[0], truth)
    assert all(map(torch.equal, tensors(found[0]), tensors(found[1])))
    set_scale(one, TOO_LARGE)
    overflowed = step(small(lambda x: other(one(x))), both, [x])
    infinite = [not bool(gradient.isfinite().all()) for gradient in overflowed.gradients]
    assert infinite[1]  # the first model's first weight
    assert not any(infinite[5:])  # the second model's


def parameter_gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_second_backward_over_a_retained_graph_adds_the_same() -> None:
    model, x = Two(), torch.randn(4, 8)
    loss = fp16(model)(x).square().mean()
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in parameter_gradients(model)]
    loss.backward()
    assert all(
        torch.equal(twice, 2 * gradient) for twice, gradient in zip(parameter_gradients(model), once, strict=True)
    )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_autograd_grad_returns_true_gradients() -> None:
    model, x = Two(), torch.randn(4, 8, requires_grad=True)
    exact, exact_x = in_fp64(model), in_fp64(x)
    truth = torch.autograd.grad(exact(exact_x).square().mean(), [exact_x, *exact.parameters()])
    compiled = fp16(model)
    found = torch.autograd.grad(compiled(x).square().mean(), [x, *model.parameters()])
    assert max(map(relative_error, found, truth)) < BOUND
    (alone,) = torch.autograd.grad(compiled(x).square().mean(), [model.first.weight])
    assert torch.equal(alone, found[1])
    assert [x.grad, *parameter_gradients(model)] == [None] * 5


def test_each_backward_unscales_by_the_scale_of_its_own_forward() -> None:
    model, x = Two(), torch.randn(4, 8)
    compiled, found = fp16(model), []
    for scales in (SCALES, SCALES[:1] * 2):
        model.zero_grad()
        losses = []
        for scale, batch in zip(scales, (x, x + 1), strict=True):
            set_scale(compiled, scale)
            losses.append(compiled(batch).square().mean())
        set_scale(compiled, 2.0**8)
        for loss in losses:
            loss.backward()
        found.append(parameter_gradients(model))
    assert all(map(torch.equal, *found))
    exact = in_fp64(model)
    (exact(x.double()).square().mean() + exact(x.double() + 1).square().mean()).backward()
    assert max(map(relative_error, found[0], parameter_gradients(exact))) < BOUND


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_pass_without_gradients_in_between(context: Callable[[], Any]) -> None:
    model, x = Two(), torch.randn(4, 8)
    exact, compiled = in_fp64(model), fp16(model)
    loss = compiled(x).square().mean()
    with context():
        found = compiled(x + 1)
        assert relative_error(found, exact(x.double() + 1)) < BOUND
    loss.backward()
    exact(x.double()).square().mean().backward()
    assert max(map(relative_error, parameter_gradients(model), parameter_gradients(exact))) < BOUND


def test_double_backward_raises_the_error_of_torch() -> None:
    model, x = Two(), torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(fp16(model)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


def tiny_loss(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return call(x).sum() * 1e-9


def test_tiny_tangents_survive() -> None:
    model, x = Two(), torch.randn(4, 8)
    exact = in_fp64(model)
    tiny_loss(exact, x.double()).backward()
    tiny_loss(fp16(model, 2.0**24), x).backward()
    assert max(map(relative_error, parameter_gradients(model), parameter_gradients(exact))) < BOUND
    model.zero_grad()
    tiny_loss(fp16(model, None), x).backward()
    assert not model.first.weight.grad.any()
    assert not model.second.weight.grad.any()


def test_tiny_tangents_survive_the_default_scale() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    exact = in_fp64(model)
    tiny_loss(exact, x.double()).backward()
    tiny_loss(fp16(model), x).backward()
    # 1e-9 * 2^16 is just above the smallest fp16 number of full precision.
    assert max(map(relative_error, parameter_gradients(model), parameter_gradients(exact))) < BOUND


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, which needs no port."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """A copy of a model whose parameters are DTensors."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        setattr(model.get_submodule(owner), own, sharded)
    return model


@pytest.mark.usefixtures("process_group")
def test_parameters_that_are_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh, plain, x = init_device_mesh("cpu", (1,)), Two(), torch.randn(4, 8)
    exact = in_fp64(plain)
    small(exact)(x.double()).square().sum().backward()
    model, inputs = shard(plain, mesh), distribute_tensor(x, mesh, [Replicate()])
    compiled, found = fp16(model), []
    for scale in SCALES:
        set_scale(compiled, scale)
        model.zero_grad()
        small(compiled)(inputs).square().sum().backward()
        assert all(isinstance(gradient, DTensor) for gradient in parameter_gradients(model))
        found.append([gradient.full_tensor() for gradient in parameter_gradients(model)])
    assert max(map(relative_error, found[0], parameter_gradients(exact))) < BOUND
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("process_group")
def test_overflow_of_a_dtensor_is_skipped_and_named() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = shard(Two(), mesh)
    compiled, runtime_of = fp16(model), mpcompile.runtime
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    (compiled(distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])) * 1e6).sum().backward()
    optimizer.step()
    assert runtime_of(compiled).last_step_skipped
    assert runtime_of(compiled).overflowed[0] == "first.weight"
    after = [parameter.detach().full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
