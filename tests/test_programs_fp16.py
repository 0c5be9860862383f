"""Whole programs in fp16: gradients are those of fp64, and no bit of them depends on the loss scale."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import mpcompile
from tests.helpers import relative_error
from tests.test_programs import Step, in_fp64, mixprec, step

BOUND = 2.0**-8
"""Relative error allowed to one output or gradient of a few fp16 layers: eight roundings, each by up to 2^-11."""
SCALES = (2.0**4, 2.0**12)
TOO_LARGE = 2.0**24
"""A loss scale, the largest there is, with which the gradients of every program here overflow."""


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    counters.clear()


def fp16(model: Callable[..., Any], scale: Any = "auto", dynamic: bool | None = None, **options: Any) -> Any:
    """``model`` compiled in fp16 with a loss scale."""
    return mixprec(model, dynamic, dtype="fp16", loss_scale=scale, **options)


def set_scale(compiled: Any, scale: float) -> None:
    """Move the dynamic loss scale of a compiled model."""
    runtime = mpcompile.runtime(compiled)
    runtime.load_state_dict({**runtime.state_dict(), "scale": scale})
    assert runtime.scale == scale


def small(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with gradients between about 2^-17 and 2^3: so both of ``SCALES`` keep them well within fp16's range."""
    return lambda *inputs: tree_map(lambda x: x / 4 if _is_differentiable(x) else x, call(*inputs))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def graphs() -> int:
    """How many graphs were compiled."""
    return int(counters["stats"]["unique_graphs"])


def assert_close(found: Step, truth: Step, bound: float = BOUND) -> None:
    """Every output, gradient and buffer by itself is within ``bound`` of the truth."""
    for mine, exact in (
        (found.outputs, truth.outputs),
        (found.gradients, truth.gradients),
        (found.buffers, truth.buffers),
    ):
        assert [value.shape for value in mine] == [value.shape for value in exact]
        for one, other in zip(mine, exact, strict=True):
            assert relative_error(one, other) < bound


def tensors(step: Step) -> list[Tensor]:
    return [*step.outputs, *step.gradients, *step.buffers]


def check_scales(
    model: Callable[..., Any],
    *inputs: Any,
    bound: float = BOUND,
    around: Callable[[Any], Callable[..., Any]] = lambda call: call,
) -> Any:
    """Compare with fp64 and one loss scale with another; ``around`` is what the user's program adds to the model."""
    exact = in_fp64(model)
    truth = step(small(around(exact)), exact, tree_map(in_fp64, inputs))
    compiled = fp16(model)
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    found, compiled_graphs = [], 0
    for scale in (*SCALES, TOO_LARGE):
        if before:
            model.load_state_dict(before)
        set_scale(compiled, scale)
        found.append(step(small(around(compiled)), model, inputs))
        compiled_graphs = compiled_graphs or graphs()
    assert graphs() == compiled_graphs > 0
    one, other, overflowed = found
    assert_close(one, truth, bound)
    assert all(map(torch.equal, tensors(one), tensors(other)))
    # The scale was there: with too large a one backward overflows, and forward does not notice.
    assert not all(bool(value.isfinite().all()) for value in overflowed.gradients)
    assert all(map(torch.equal, one.outputs, overflowed.outputs))
    return compiled


class Two(nn.Module):
    """Two layers to build programs with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


class Broken(Two):
    """A graph break between the layers: what leaves one backward enters the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


class Tied(Two):
    """One weight in three places."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.first(x).tanh()) @ self.first.weight


class Checkpointed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Views(Two):
    """Outputs that are views of one another and of an input."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return y.view(-1), y.t(), x.view(-1), x[1:], y, self.first.weight


class MutatedBuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.total.add_(x.detach().mean(0))
        return self.second(x.mul_(2) + self.total)


class WithoutGradient(Two):
    """Among the outputs are some that have no gradient: detached, of integers, of booleans."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return y.detach() * 2, y, y.argmax(-1), y > 0, self.second(y).sum()


class Condition(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.cond(y.sum() > 0, lambda y: self.second(y).sin(), lambda y: self.second(y).cos(), (y,))


class Spectral(Two):
    """Complex numbers by an FFT."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x)) * torch.polar(torch.ones_like(x[:, :5]), x[:, :5])
        return self.second(torch.fft.irfft(spectrum, n=8)) + spectrum.abs().sum()


class Solved(Two):
    """Linear algebra that a backward has for the matrix as well as for the right-hand side."""

    def forward(self, x: Tensor) -> Tensor:
        matrix = 3 * torch.eye(8, dtype=x.dtype) + self.second.weight
        return torch.linalg.solve(matrix, self.first(x).t()) + torch.linalg.cholesky(matrix @ matrix.t())[:, :4]


class Wide(Two):
    """fp64 in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x).double() * 3).sin().to(x.dtype))


class Narrow(Two):
    """An output in bf16, whose tangents are bf16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.dtype is torch.float64 else y.bfloat16()


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(torch.arange(16) % 9).view(2, 8, 8) + x[:2, None]
        return F.max_pool1d(self.group_norm(self.batch_norm(self.layer(x)).relu()), 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x[None], x[None], x[None])


class Scattered(Two):
    """Writes into places, sorts, joins, sums up."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        placed = torch.zeros_like(y).index_add(0, torch.tensor([0, 2, 0]), y[:3])
        placed[1] = y[3]
        placed = placed.scatter_add(1, torch.arange(8).expand(4, 8) // 2, y)
        return self.second(torch.cat([placed, y.sort(-1).values]).cumsum(0)).logsumexp(-1) + y.amax()


class Frozen(Two):
    """Only some parameters are trained, one of them on top of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(8, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) + x @ self.adapter @ self.adapter.t()).relu())


PROGRAMS = [
    Two,
    Broken,
    Tied,
    Checkpointed,
    Views,
    MutatedBuffer,
    WithoutGradient,
    Condition,
    Spectral,
    Solved,
    Wide,
    Convolutional,
    Attention,
    Scattered,
    Frozen,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_fp64_under_any_scale(program: type[nn.Module]) -> None:
    check_scales(program(), torch.randn(4, 8, requires_grad=True))


def test_tangents_in_bf16() -> None:
    # One rounding of the output and one of its tangent by up to 2^-9 come on top.
    check_scales(Narrow(), torch.randn(4, 8, requires_grad=True), bound=2.0**-7)


class MutatesInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def test_input_that_needs_a_gradient_and_is_written_into() -> None:
    # What was written is an output of the graph, with a tangent of its own.
    def around(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        def program(x: Tensor) -> Any:
            middle = x * 1.5
            return call(middle), middle * middle

        return program

    check_scales(MutatesInput(), torch.randn(4, 8, requires_grad=True), around=around)


def test_function_over_parameters() -> None:
    weight = nn.Parameter(torch.randn(8, 8) / 3)
    exact = in_fp64(weight)

    def product(x: Tensor, other: Tensor | None = None) -> Tensor:
        return (x @ (weight if other is None else other)).tanh()

    x = torch.randn(4, 8)
    small(lambda x: product(x, exact))(x.double()).sum().backward()
    compiled, found = fp16(product), []
    for scale in SCALES:
        set_scale(compiled, scale)
        weight.grad = None
        small(compiled)(x).sum().backward()
        found.append(weight.grad)
    assert relative_error(found[0], exact.grad) < BOUND
    assert torch.equal(*found)


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
