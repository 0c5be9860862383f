"""What users do with gradients, optimizers and checkpoints while fp16 gradients are scaled inside the graph."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import mpcompile
from tests.helpers import Net, relative_error
from tests.test_programs import error, in_fp64
from tests.test_programs_fp16 import BOUND, SCALES, TOO_LARGE, fp16, set_scale

ALL = ("first.weight", "first.bias", "last.weight", "last.bias")


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


def assert_close(found: Iterable[Tensor], truth: Iterable[Tensor], bound: float = BOUND) -> None:
    assert max(map(relative_error, found, truth)) < bound


def backward(call: Callable[[Tensor], Tensor], x: Tensor, factor: float = 1.0) -> None:
    """Of a loss that ``factor`` makes large: times 1e9 its gradients are beyond fp16 under every scale used here."""
    (call(x).square().mean() * factor).backward()


def train_step(call: Any, optimizer: Optimizer, x: Tensor, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    backward(call, x, factor)
    optimizer.step()


def train_steps(call: Any, optimizer: Optimizer, x: Tensor, count: int, factor: float = 1.0) -> list[float]:
    """The loss scale after each step."""
    scales = []
    for _ in range(count):
        train_step(call, optimizer, x, factor)
        scales.append(mpcompile.runtime(call).scale)
    return scales


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}


@pytest.mark.parametrize("how", CLIPS)
def test_clipping_sees_the_sum_of_true_gradients(how: str) -> None:
    model, batches = Net(), [torch.randn(4, 8) for _ in range(3)]
    exact, compiled, found = in_fp64(model), fp16(model), []
    for x in batches:
        backward(exact, x.double())
    unclipped = gradients(exact)
    CLIPS[how](exact.parameters())
    assert error(gradients(exact), unclipped) > 0.1  # there was something to clip
    for scale in SCALES:
        set_scale(compiled, scale)
        model.zero_grad()
        for x in batches:
            backward(compiled, x)
        CLIPS[how](model.parameters())
        found.append(gradients(model))
    assert_close(found[0], gradients(exact))
    assert_equal(*found)


class WithLoss(Net):
    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        logits = super().forward(x)
        return logits if target is None else F.cross_entropy(logits, target)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_loss_inside_and_outside_the_graph() -> None:
    model, x, target = WithLoss(), torch.randn(8, 8), torch.arange(8) % 4
    exact, compiled, found = in_fp64(model), fp16(model), []
    exact(x.double(), target).backward()
    for scale in SCALES:
        set_scale(compiled, scale)
        for loss in (lambda: compiled(x, target), lambda: F.cross_entropy(compiled(x), target)):
            model.zero_grad()
            loss().backward()
            found.append(gradients(model))
            assert_close(found[-1], gradients(exact))
    assert_equal(found[0], found[2])
    assert_equal(found[1], found[3])


def test_weights_loaded_in_between_are_trained_on() -> None:
    model, other, x = Net(), Net(), torch.randn(4, 8)
    compiled = fp16(model)
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=0.1), mpcompile.runtime(compiled)
    train_step(compiled, optimizer, x)
    train_step(compiled, optimizer, x, 1e9)
    state = copy.deepcopy(runtime.state_dict())
    model.load_state_dict(other.state_dict())
    assert runtime.state_dict() == state  # the weights are no part of it
    exact = in_fp64(other)
    train_step(compiled, optimizer, x)
    train_step(exact, torch.optim.SGD(exact.parameters(), lr=0.1), x.double())
    assert_close(gradients(model), gradients(exact))
    assert_close(copies(model), copies(exact))
    train_step(compiled, optimizer, x, 1e9)
    assert (runtime.last_step_skipped, runtime.overflowed[0], runtime.skipped_steps) == (True, "first.weight", 2)


def test_parameters_replaced_in_between_are_judged_as_well() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    train_step(compiled, torch.optim.SGD(model.parameters(), lr=0.1), x)
    model.load_state_dict(Net().state_dict(), assign=True)
    optimizer, runtime, before = torch.optim.SGD(model.parameters(), lr=0.1), mpcompile.runtime(compiled), copies(model)
    train_step(compiled, optimizer, x, 1e9)
    assert runtime.overflowed[:3] == ALL[:3]
    assert_equal(copies(model), before)


def test_saliency_of_an_input_is_unscaled() -> None:
    model, x = Net(), torch.randn(4, 8, requires_grad=True)
    exact, exact_x = in_fp64(model), in_fp64(x)
    compiled, found = fp16(model), []
    for scale in SCALES:
        set_scale(compiled, scale)
        found.append(torch.autograd.grad(compiled(x).amax(1).sum(), x)[0])
    (truth,) = torch.autograd.grad(exact(exact_x).amax(1).sum(), exact_x)
    assert relative_error(found[0], truth) < BOUND
    assert torch.equal(*found)


def test_hooks_see_true_gradients() -> None:
    model, x = Net(), torch.randn(4, 8)
    exact, compiled = in_fp64(model), fp16(model)
    before: list[Tensor] = []
    after: list[Tensor] = []
    model.first.weight.register_hook(before.append)
    model.last.weight.register_post_accumulate_grad_hook(lambda parameter: after.append(parameter.grad.clone()))
    backward(compiled, x)
    backward(exact, x.double())
    assert relative_error(before[0], exact.first.weight.grad) < BOUND
    assert relative_error(after[0], exact.last.weight.grad) < BOUND
    assert len(before) == len(after) == 1


def test_optimizer_stepped_inside_backward() -> None:
    # A hook that steps each parameter as soon as it has its gradient, to keep no gradients in memory.
    model, x = Net(), torch.randn(4, 8)
    compiled, exact = fp16(model), in_fp64(model)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    backward(compiled, x)
    train_step(exact, torch.optim.SGD(exact.parameters(), lr=0.1), x.double())
    assert_close(copies(model), copies(exact))
    # Each parameter is judged for itself. The last bias is summed in fp32, and goes on where all others overflow.
    set_scale(compiled, TOO_LARGE)
    before = copies(model)
    backward(compiled, x)
    moved = [not torch.equal(*pair) for pair in zip(before, copies(model), strict=True)]
    assert moved == [False, False, False, True]
    # What overflowed was stepped over, and is gone.
    set_scale(compiled, SCALES[1])
    exact = in_fp64(model)
    backward(compiled, x)
    train_step(exact, torch.optim.SGD(exact.parameters(), lr=0.1), x.double())
    assert_close(copies(model), copies(exact))


def test_layer_that_is_unfrozen_later() -> None:
    model, x = Net(), torch.randn(4, 8)
    model.first.requires_grad_(False)
    compiled = fp16(model)
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=0.1), mpcompile.runtime(compiled)
    train_step(compiled, optimizer, x, 1e9)
    assert runtime.overflowed[0] == "last.weight"
    model.first.requires_grad_(True)
    train_step(compiled, optimizer, x, 1e9)
    assert (runtime.overflowed[:3], runtime.skipped_steps, runtime.scale) == (ALL[:3], 2, 2.0**14)
    exact = in_fp64(model)
    train_step(compiled, optimizer, x)
    train_step(exact, torch.optim.SGD(exact.parameters(), lr=0.1), x.double())
    assert_close(copies(model), copies(exact))


def test_step_without_gradients_counts_for_nothing() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model, {"growth_interval": 2})
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=0.1), mpcompile.runtime(compiled)
    train_step(compiled, optimizer, x)
    state = runtime.state_dict()
    optimizer.zero_grad()
    optimizer.step()
    with torch.no_grad():
        compiled(x)
    assert runtime.state_dict() == state
    train_step(compiled, optimizer, x)
    assert runtime.scale == 2.0**17


def test_run_moves_over_from_grad_scaler_and_back() -> None:
    model, x = Net(), torch.randn(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=7)
    external = fp16(model, "external")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = in_fp64(model)
    scaler.scale(external(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    backward(exact, x.double())
    assert_close(gradients(model), gradients(exact))
    scaler.step(optimizer)
    scaler.update()
    torch._dynamo.reset()
    compiled = fp16(model)
    runtime = mpcompile.runtime(compiled)
    runtime.load_state_dict(scaler.state_dict())
    assert {**runtime.state_dict(), **scaler.state_dict()} == runtime.state_dict()
    exact = in_fp64(model)
    train_step(compiled, optimizer, x)
    backward(exact, x.double())
    assert_close(gradients(model), gradients(exact))
    scaler.load_state_dict({key: runtime.state_dict()[key] for key in scaler.state_dict()})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**13, 2)


def test_grad_scaler_beside_the_graph_s_own_scaling_is_refused() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled, scaler = fp16(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), copies(model)
    scaler.scale(compiled(x).square().mean() / 64).backward()
    with pytest.raises(mpcompile.MixprecError, match="Remove the GradScaler"):
        scaler.step(optimizer)
    assert_equal(copies(model), before)
