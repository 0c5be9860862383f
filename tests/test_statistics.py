"""keep_statistics_finite: an fp16 forward that overflows leaves no trace in running statistics."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import mpcompile
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.statistics import keep_statistics_finite
from tests.helpers import calls, reasons, text
from tests.test_programs import in_fp64, mixprec

INF = float("inf")
FP16 = Policy(dtype=torch.float16)


def batch_norm_1d() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def batch_norm_2d() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3, momentum=0.3))


def instance_norm_1d() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(4, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))


def instance_norm_2d() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 3, 1), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))


Make = Callable[[], nn.Sequential]
MODELS: list[tuple[Make, tuple[int, ...]]] = [
    (batch_norm_1d, (8, 4)),
    (batch_norm_2d, (2, 4, 3, 3)),
    (instance_norm_1d, (2, 4, 6)),
    (instance_norm_2d, (2, 4, 3, 3)),
]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the running means and variances."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def overflowing(shape: tuple[int, ...]) -> Tensor:
    """A batch that fp16 cannot hold behind the first layer."""
    return torch.randn(shape) * 1e6


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_an_overflow_leaves_the_statistics_bitwise_as_they_were(make: Make, shape: tuple[int, ...], grad: bool) -> None:
    model = make()
    compiled = mixprec(model, dtype="fp16")
    with torch.set_grad_enabled(grad):
        compiled(torch.randn(shape))
        before = statistics(model)
        y = compiled(overflowing(shape))
    assert not torch.isfinite(y).all()
    assert len(before) == 2
    for name, value in statistics(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_finite_statistics_are_updated_as_in_fp64(make: Make, shape: tuple[int, ...], grad: bool) -> None:
    model = make()
    exact, compiled = in_fp64(model), mixprec(model, dtype="fp16")
    with torch.set_grad_enabled(grad):
        for batch in (torch.randn(shape), torch.randn(shape) + 1):
            compiled(batch)
            exact(batch.double())
    truth = statistics(exact)
    for name, value in statistics(model).items():
        # Two rounded operands and a rounded result before statistics in fp32 of numbers of about 1, of which the
        # variance takes the square.
        assert (value.double() - truth[name]).abs().max() <= 8 * 2.0**-11, name
        assert not torch.equal(value, torch.zeros(3) if "mean" in name else torch.ones(3)), name


def test_only_the_channels_that_overflow_keep_theirs() -> None:
    model = batch_norm_1d()
    with torch.no_grad():
        model[0].weight[1] *= 2e4
    compiled = mixprec(model, dtype="fp16")
    compiled(torch.randn(8, 4) * 100)
    assert (model[1].running_mean[1], model[1].running_var[1]) == (0.0, 1.0)
    assert torch.isfinite(model[1].running_mean).all()
    assert (model[1].running_mean[[0, 2]] != 0).all()
    assert (model[1].running_var[[0, 2]] > 1).all()


def test_a_batch_with_one_bad_row_leaves_them_too() -> None:
    model, batch = batch_norm_1d(), torch.randn(8, 4)
    batch[3] *= 1e6
    compiled = mixprec(model, dtype="fp16")
    compiled(batch)
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    assert torch.equal(model[1].running_var, torch.ones(3))


def test_a_layer_used_twice_keeps_the_statistics_of_before_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(self.layer(x)) + self.norm(self.layer(y))

    model = Twice()
    compiled = mixprec(model, dtype="fp16")
    compiled(torch.randn(8, 4), torch.randn(8, 4))
    before = statistics(model)
    for batches in ((torch.randn(8, 4), overflowing((8, 4))), (overflowing((8, 4)), torch.randn(8, 4))):
        compiled(*batches)
        for name, value in statistics(model).items():
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("compiler", ["aot_eager", "reference"])
def test_bf16_writes_what_it_computes(compiler: str) -> None:
    # bf16 has fp32's range: what is infinite there is infinite in fp32, and stays visible.
    model = batch_norm_1d()
    mixprec(model, compiler=compiler)(torch.full((8, 4), INF))
    assert not torch.isfinite(model[1].running_mean).any()


class Tracked(nn.Module):
    """Keeps the last output and a running mean in buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(8, 3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last.copy_(y.detach())
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y


def test_buffers_of_the_users_own_are_written_as_they_are() -> None:
    model = Tracked()
    y = mixprec(model, dtype="fp16")(overflowing((8, 4)))
    assert torch.equal(model.last.nan_to_num(nan=-1.0), y.detach().nan_to_num(nan=-1.0))
    assert not torch.isfinite(model.last).any()
    assert not torch.isfinite(model.mean).any()


def test_the_count_of_batches_goes_on() -> None:
    model = batch_norm_1d()
    compiled = mixprec(model, dtype="fp16")
    for batch in (torch.randn(8, 4), overflowing((8, 4)), torch.randn(8, 4)):
        compiled(batch)
    assert int(model[1].num_batches_tracked) == 3


def test_evaluation_changes_nothing() -> None:
    model = batch_norm_1d().eval()
    before = statistics(model)
    mixprec(model, dtype="fp16")(overflowing((8, 4)))
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


# The graph.


def traced(model: nn.Module) -> fx.GraphModule:
    """The joint graph of a model as the passes get it, with the writes to its buffers."""
    compiled = mixprec(model, dtype="fp16")
    compiled(torch.randn(8, 4))
    return mpcompile.reports(compiled)[0].modules[0][0]


def writes(gm: fx.GraphModule) -> list[fx.Node]:
    """The writes to buffers, the count of batches apart."""
    return [node for node in calls(gm, "copy_") if node.meta["val"].is_floating_point()]


def test_what_is_written_is_chosen_by_whether_it_is_finite() -> None:
    gm = traced(batch_norm_1d())
    news = [node.args[1] for node in writes(gm)]
    assert len(news) == 2
    result = keep_statistics_finite(gm, FP16)
    gm.graph.lint()
    assert reasons(result) == ["statistics stay finite"] * 2
    for write, new in zip(writes(gm), news, strict=True):
        finite, chosen, buffer = write.args[1].args
        assert (chosen, buffer) == (new, write.args[0])
        assert finite.args[1] == INF
        assert finite.args[0].args == (new,)


def test_running_it_again_changes_nothing() -> None:
    gm = traced(batch_norm_1d())
    run_passes(gm, FP16)
    before = text(gm)
    assert not keep_statistics_finite(gm, FP16).changed
    assert not any(result.changed for result in run_passes(gm, FP16))
    assert text(gm) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_of_other_policies_are_left_alone(dtype: torch.dtype) -> None:
    gm = traced(batch_norm_1d())
    before = text(gm)
    assert not keep_statistics_finite(gm, Policy(dtype=dtype)).changed
    assert text(gm) == before


def test_writes_to_other_buffers_are_left_alone() -> None:
    gm = traced(Tracked())
    before = text(gm)
    assert len(writes(gm)) == 2
    assert not keep_statistics_finite(gm, FP16).changed
    assert text(gm) == before


def test_the_count_is_left_alone() -> None:
    gm = traced(batch_norm_1d())
    (count,) = set(calls(gm, "copy_")) - set(writes(gm))
    new = count.args[1]
    keep_statistics_finite(gm, FP16)
    assert count.args[1] is new


# Training goes on.


def train(model: nn.Module, batches: list[Tensor], **options: object) -> nn.Module:
    """Some optimizer steps."""
    compiled = mixprec(model, dtype="fp16", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        compiled(batch).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_batch_leaves_no_trace_in_training(bad: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    batches = [torch.randn(8, 4) for _ in range(4)]
    # A scale that stays as it is: every later step of the two models is the same to the bit.
    train(model, [*batches[:bad], overflowing((8, 4)), *batches[bad:]], loss_scale=1024)
    train(twin, batches, loss_scale=1024)
    for (name, value), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert not torch.equal(model[0].weight, start[0].weight)
    for name, value in statistics(model).items():
        assert torch.equal(value, statistics(twin)[name]), name


def test_training_on_comes_close_to_fp64() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    exact, batches = in_fp64(model), [torch.randn(8, 4) for _ in range(4)]
    train(model, [overflowing((8, 4)), *batches])
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        exact(batch.double()).square().mean().backward()
        optimizer.step()
    for (name, value), truth in zip(model.named_parameters(), exact.parameters(), strict=True):
        # Four steps of a tenth of gradients that err by a few roundings.
        assert (value.double() - truth).abs().max() <= 4 * 0.1 * 16 * 2.0**-11, name


@pytest.mark.inductor
def test_generated_code_keeps_them_too() -> None:
    model = batch_norm_1d()
    exact, batch = in_fp64(model), torch.randn(8, 4)
    compiled = mixprec(model, dtype="fp16", compiler="inductor")
    compiled(batch)
    exact(batch.double())
    before = statistics(model)
    assert not torch.isfinite(compiled(overflowing((8, 4)))).all()
    for name, value in statistics(model).items():
        assert torch.equal(value, before[name]), name
        assert (value.double() - statistics(exact)[name]).abs().max() <= 8 * 2.0**-11, name
