"""The measuring parts of the benchmark, on functions whose figures are known."""

import itertools
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy import make, measure_errors, result_of, without_dropout
from benchmarks.casts import count_casts
from benchmarks.gemm_limit import collect
from benchmarks.measure import Setting, measure
from benchmarks.memory import saved_bytes
from benchmarks.peers import BASELINE, EAGER, FP32, MIXPREC, Candidate, Peer
from benchmarks.workloads import Workload
from mpcompile.measurement import interleaved

CPU = torch.device("cpu")


class Sine(nn.Module):
    """[2, 4] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().sin().sum()


class Halves(Sine):
    """Keeps two views of one value."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).chunk(2, dim=1)
        return (first * second).sum()


class Dropping(Sine):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


def eager(model: nn.Module, _: Workload) -> Any:
    return model


def workload(model: type[nn.Module] = Sine, **settings: Any) -> Workload:
    return Workload(name="tiny", model=model, inputs=lambda: (torch.randn(2, 4),), **settings)


def candidate(of: Workload | None = None, name: str = FP32, **settings: Any) -> Candidate:
    model, inputs = make(of or workload(), 0, CPU)
    return Peer(name=name, **{"compile": eager, **settings}).candidate(of or workload(), model, inputs)


def compiled(model: nn.Module, _: Workload) -> Any:
    return torch.compile(model)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def test_saved_bytes_of_a_sine() -> None:
    # Its argument, [2, 6] in fp32; the linear layer keeps its input and its weight, which do not count.
    ours = candidate()
    assert saved_bytes(ours) == 2 * 6 * 4
    ours.inputs[0].requires_grad_()
    assert saved_bytes(ours) == 2 * 6 * 4


def test_saved_views_of_one_storage_count_once() -> None:
    assert saved_bytes(candidate(workload(Halves))) == 2 * 6 * 4


def test_saved_low_copies_count() -> None:
    low_input, low_weight, sine = 2 * 4 * 2, 6 * 4 * 2, 2 * 6 * 4
    ours = candidate(context=autocast)
    assert saved_bytes(ours) == low_input + sine
    ours.inputs[0].requires_grad_()  # now backward needs the weight as well
    assert saved_bytes(ours) == low_input + low_weight + sine


def test_matmuls_of_a_step_are_collected_and_run_again() -> None:
    collector = collect(candidate(workload(micro_batches=3)).step)
    assert names(collector.counts) == {"mm": 6}  # x W' and, the input needing no gradient, x' dy
    assert len(collector.counts) == 2
    again = collect(collector.replay)
    assert again.counts == collector.counts  # shapes, strides and dtypes too


def test_matmuls_of_other_strides_are_other_calls() -> None:
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    assert sorted(collect(lambda: (x @ w, x @ w.t(), x @ w)).counts.values()) == [1, 2]


def test_convolutions_and_attention_are_collected_with_their_backward() -> None:
    x = torch.randn(1, 4, 8, 8, requires_grad=True)

    def step() -> None:
        h = nn.Conv2d(4, 4, 3, padding=1)(x)
        F.scaled_dot_product_attention(h, h, h).sum().backward()

    kinds = names(collect(step).counts)
    assert kinds["convolution"] == kinds["convolution_backward"] == 1
    assert sum(count for name, count in kinds.items() if name.startswith("_scaled_dot_product")) == 2


def names(counts: Counter[Any]) -> Counter[str]:
    total: Counter[str] = Counter()
    for signature, count in counts.items():
        total[signature[0].overloadpacket.__name__] += count
    return total


@pytest.mark.parametrize(("name", "how"), [(BASELINE, compiled), (EAGER, eager)])
def test_casts_of_autocast(name: str, how: Any) -> None:
    # Forward: input and weight narrow, the result widens. Backward: its gradient narrows, the weight's widens.
    elements = 2 * 4 + 6 * 4 + 2 * 6 + 2 * 6 + 6 * 4
    assert count_casts(candidate(name=name, context=autocast, compile=how)) == (5, elements * 6)


def test_casts_of_mixprec_are_those_of_its_report() -> None:
    def mixprec(model: nn.Module, _: Workload) -> Any:
        return torch.compile(model, backend="mixprec", options={"dtype": "bf16", "compiler": "aot_eager"})

    ours = candidate(name=MIXPREC, compile=mixprec)
    ours.step()
    casts, cast_bytes = count_casts(ours)
    assert casts >= 4
    assert cast_bytes >= (2 * 4 + 6 * 4 + 2 * 6) * 6


def test_micro_batches_accumulate() -> None:
    once, thrice = candidate(), candidate(workload(micro_batches=3))
    torch.testing.assert_close(result_of(thrice), 3 * result_of(once))


def test_a_scaled_loss_gives_unscaled_gradients() -> None:
    scaled = candidate(scaled=True)
    for _ in range(2):  # a second step needs the scaler to be done with the first
        torch.testing.assert_close(result_of(scaled), result_of(candidate()))


def test_prepare_makes_kept_copies_of_weights_stale() -> None:
    ours = candidate()
    ours.step()
    before, version = ours.model.linear.weight.clone(), ours.model.linear.weight._version
    ours.prepare()
    assert ours.model.linear.weight.grad is None
    assert ours.model.linear.weight._version > version
    assert torch.equal(ours.model.linear.weight, before)


def test_inference_records_no_gradients() -> None:
    ours = candidate(workload(training=False))
    assert not ours.model.training
    assert not ours.step().requires_grad


def test_errors_are_against_fp64_per_seed() -> None:
    exact = candidate(name="exact", dtype=torch.float64)
    low = candidate(name="low", dtype=torch.bfloat16)
    errors = measure_errors([exact, low], [3, 4])
    assert errors["exact"] == (0.0, 0.0)
    first, second = errors["low"]
    assert first != second
    assert 2.0**-12 < min(first, second) < max(first, second) < 2.0**-5  # a few roundings of 2^-9


def test_errors_need_dropout_off() -> None:
    noisy = workload(Dropping)
    with pytest.raises(ValueError, match="draw dropout"):
        measure_errors([candidate(noisy)], [0])
    quiet = candidate(noisy, dtype=torch.float64)
    without_dropout(quiet.model)
    assert measure_errors([quiet], [0]) == {FP32: (0.0,)}


def test_rounds_are_interleaved_and_nobody_has_a_place_of_its_own() -> None:
    log: list[str] = []
    work = {name: lambda name=name: log.append(name) for name in "abc"}
    medians = interleaved(work, 20, CPU, {"b": lambda: log.append("prepare b")})
    assert [log[place - 1] for place, name in enumerate(log) if name == "b"] == ["prepare b"] * 20
    calls = [name for name in log if name in work]
    rounds = [tuple(calls[start : start + 3]) for start in range(0, 60, 3)]
    assert {tuple(sorted(each)) for each in rounds} == {("a", "b", "c")}
    assert len(set(rounds)) == 6  # every order there is
    assert list(medians) == ["a", "b", "c"]


def test_medians_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.accumulate([0, 1, 5, 9, 5, 2])  # starts and ends of steps of 1, 9 and 2 seconds
    monkeypatch.setattr("mpcompile.measurement.time.perf_counter", lambda: next(ticks))
    assert interleaved({"a": lambda: None}, 3, CPU) == {"a": 2}


@pytest.mark.parametrize("model", [Sine, Dropping])
def test_a_workload_is_measured_whole(model: type[nn.Module]) -> None:
    contexts = {MIXPREC: nullcontext, BASELINE: autocast, FP32: nullcontext}
    peers = [Peer(name=name, compile=eager_or_mixprec(name), context=of) for name, of in contexts.items()]
    tiny = workload(model, micro_batches=2)
    result = measure(tiny, peers, Setting(device=CPU, low=torch.bfloat16, rounds=2, seeds=[0, 1]))
    assert set(result.peers) == set(contexts)
    assert len(result.peers[MIXPREC].errors) == 2
    assert result.peers[FP32].error < 1e-6 < result.peers[MIXPREC].error
    assert result.peers[FP32].casts == 0
    assert result.peers[MIXPREC].peak_bytes is None  # a CPU
    assert min(result.gemm_fp32_ms, result.gemm_low_ms) > 0


def eager_or_mixprec(name: str) -> Any:
    if name != MIXPREC:
        return eager
    options = {"dtype": "bf16", "compiler": "aot_eager"}
    return lambda model, _: torch.compile(model, backend="mixprec", options=options)
