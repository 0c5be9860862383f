"""fp16 training loops go where fp64 loops go, and what scales the gradients can be seen."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import mpcompile
from tests.helpers import relative_error
from tests.test_programs import error, in_fp64, mixprec
from tests.test_programs_fp16 import BOUND, SCALES, fp16, set_scale

BAND = 0.02
"""Relative error allowed to the way that weights went in a few steps: AdamW divides by what gradients are."""
LR, CLIP = 1e-2, 2.5


class Net(nn.Module):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


Batches = list[list[tuple[Tensor, Tensor]]]


def make_batches(steps: int, micro: int = 4) -> Batches:
    """For each optimizer step some micro-batches."""
    inputs = [[torch.randn(16, 8) for _ in range(micro)] for _ in range(steps)]
    return [[(x, x[:, :1] * x[:, 1:2] + 1) for x in group] for group in inputs]


@dataclass
class Loop:
    """A training loop as people write it: accumulation, clipping, a schedule."""

    call: Callable[[Tensor], Tensor]
    model: nn.Module
    optimizer: Optimizer
    scheduler: CosineAnnealingLR

    @classmethod
    def of(cls, call: Any, model: nn.Module, kind: str = "adamw") -> "Loop":
        parameters = model.parameters()
        optimizer = (
            torch.optim.AdamW(parameters, LR) if kind == "adamw" else torch.optim.SGD(parameters, LR, momentum=0.9)
        )
        return cls(call, model, optimizer, CosineAnnealingLR(optimizer, T_max=20))

    def train(self, batches: Batches, skipped: Collection[int] = ()) -> list[float]:
        """The norms of the gradients before they were clipped; the steps in ``skipped`` are left out."""
        norms = []
        for step, group in enumerate(batches):
            self.optimizer.zero_grad()
            for x, y in group:
                (F.mse_loss(self.call(x), y) / len(group)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))
            if step in skipped:
                self.optimizer.zero_grad()
            self.optimizer.step()
            self.scheduler.step()
        return norms


def in_fp64_too(batches: Batches) -> Batches:
    return [[(x.double(), y.double()) for x, y in group] for group in batches]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def way(model: nn.Module, start: Iterable[Tensor]) -> list[Tensor]:
    """How far each parameter went from ``start``."""
    return [parameter.detach().double() - before for parameter, before in zip(model.parameters(), start, strict=True)]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_accumulated_clipped_and_scheduled_training_follows_fp64(kind: str) -> None:
    model, batches = Net(), make_batches(10)
    exact, start = in_fp64(model), copies(model)
    truth = Loop.of(exact, exact, kind).train(in_fp64_too(batches))
    compiled = fp16(model, {"init_scale": 2.0**12, "growth_interval": 3})
    norms = Loop.of(compiled, model, kind).train(batches)
    runtime = mpcompile.runtime(compiled)
    assert runtime.skipped_steps == 0
    assert runtime.scale == 2.0**15  # it grew three times meanwhile
    assert error(way(model, start), way(exact, start)) < BAND
    # What is clipped are the true gradients: their norms are those of fp64.
    assert max(truth) > CLIP > min(truth)  # some steps are clipped
    assert error([torch.tensor(norms)], [torch.tensor(truth)]) < BOUND


def test_skipped_steps_are_the_only_difference() -> None:
    # The scale starts at its cap and falls until a step goes through: the fp64 loop leaves out the same steps.
    model, batches = Net(), make_batches(14)
    exact, start = in_fp64(model), copies(model)
    compiled = fp16(model, {"init_scale": 2.0**24})
    loop, runtime, skipped = Loop.of(compiled, model), mpcompile.runtime(compiled), []
    for step, group in enumerate(batches):
        before = copies(model)
        loop.train([group])
        if runtime.last_step_skipped:
            skipped.append(step)
            assert all(map(torch.equal, before, copies(model)))
    assert skipped == list(range(len(skipped)))
    assert 2 < len(skipped) < 10
    assert runtime.scale == 2.0 ** (24 - len(skipped))
    assert runtime.skipped_steps == len(skipped)
    assert {int(state["step"]) for state in loop.optimizer.state.values()} == {14 - len(skipped)}
    Loop.of(exact, exact).train(in_fp64_too(batches), skipped)
    assert error(way(model, start), way(exact, start)) < BAND


def test_one_bad_micro_batch_skips_the_whole_step() -> None:
    model, batches = Net(), make_batches(3)
    exact, start = in_fp64(model), copies(model)
    bad = [group[:] for group in batches]
    bad[1][2] = (bad[1][2][0], bad[1][2][1] * 1e9)
    compiled = fp16(model, {"init_scale": 2.0**12})
    loop, runtime, skipped = Loop.of(compiled, model), mpcompile.runtime(compiled), []
    for group in bad:
        loop.train([group])
        skipped.append(runtime.last_step_skipped)
    assert skipped == [False, True, False]
    assert runtime.scale == 2.0**11
    Loop.of(exact, exact).train(in_fp64_too(batches), skipped=[1])
    assert error(way(model, start), way(exact, start)) < BAND


def resume(saved: bytes, when: str, batches: Batches) -> tuple[nn.Module, Any]:
    """Go on from a checkpoint in a new model; its runtime is loaded before or after the first call."""
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    model = Net()
    compiled = fp16(model, {"growth_interval": 3})
    if when == "after":
        compiled(batches[0][0][0]).mean().backward()
        model.zero_grad()
    loop, runtime = Loop.of(compiled, model), mpcompile.runtime(compiled)
    model.load_state_dict(checkpoint["model"])
    loop.optimizer.load_state_dict(checkpoint["optimizer"])
    loop.scheduler.load_state_dict(checkpoint["scheduler"])
    runtime.load_state_dict(checkpoint["runtime"])
    loop.train(batches)
    return model, runtime


@pytest.mark.parametrize("when", ["before", "after"])
def test_training_resumed_from_a_checkpoint_is_the_same_to_the_bit(when: str) -> None:
    model, batches = Net(), make_batches(9, 2)
    batches[2][0] = (batches[2][0][0], batches[2][0][1] * 1e9)  # one skipped step before the checkpoint
    compiled = fp16(model, {"init_scale": 2.0**12, "growth_interval": 3})
    loop, runtime = Loop.of(compiled, model), mpcompile.runtime(compiled)
    loop.train(batches[:5])
    file = io.BytesIO()
    parts = {"model": model, "optimizer": loop.optimizer, "scheduler": loop.scheduler, "runtime": runtime}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    loop.train(batches[5:])
    resumed, resumed_runtime = resume(file.getvalue(), when, batches[5:])
    assert all(map(torch.equal, copies(model), copies(resumed)))
    # Two clean steps after the skipped one were counted before the checkpoint: the third let the scale grow.
    assert resumed_runtime.state_dict() == runtime.state_dict()
    assert (runtime.scale, runtime.skipped_steps) == (2.0**13, 1)


def graph_of(report: mpcompile.Report) -> str:
    (graph,) = report.graphs
    return graph.after


def scaling_changes(report: mpcompile.Report) -> list[str]:
    return [
        change.node
        for graph in report.graphs
        for result in graph.results
        for change in result.changes
        if result.name == "insert_loss_scaling"
    ]


NAMED = [
    "scaled_tangents_1",
    "inverse_scale",
    "unscaled_first_weight",
    "unscaled_first_bias",
    "unscaled_last_weight",
    "unscaled_last_bias",
    "gradient_flags",
]


def test_nodes_that_scale_are_named_in_reports() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    compiled(x).sum().backward()
    (report,) = mpcompile.reports(compiled)
    lines = [line.split(":")[0] for line in graph_of(report).splitlines()]
    assert [name for name in NAMED if name not in lines] == []
    assert set(scaling_changes(report)) == set(NAMED) - {"inverse_scale"}
    explained = mpcompile.explain(model, x, options={"dtype": "fp16"})
    assert explained.graphs == report.graphs
    assert mpcompile.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": None}, {"policy": "fp32"}])
def test_nothing_scales_where_nothing_is_to_be_scaled(options: dict[str, Any]) -> None:
    model, x = Net(), torch.randn(4, 8)
    report = mpcompile.explain(model, x, options=options)
    found = graph_of(report)
    assert not any(name in found for name in ("scale", "flags"))
    assert scaling_changes(report) == []
    # No inputs but the model's own, and the tangent.
    assert found.count("= input") == 6
    compiled = mixprec(model, **{"dtype": "auto", **options})
    compiled(x).sum().backward()
    runtime = mpcompile.runtime(compiled)
    assert (runtime.scale, runtime.state_dict()) == (1.0, {})


def test_a_pass_without_gradients_scales_nothing() -> None:
    model = Net()
    compiled = fp16(model)
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    (report,) = mpcompile.reports(compiled)
    assert "scale" not in graph_of(report)
    assert scaling_changes(report) == []


@pytest.mark.inductor
def test_generated_code_scales_and_flags() -> None:
    model, x = Net(), torch.randn(4, 8)
    exact = in_fp64(model)
    (exact(x.double()).square().sum() / 4).backward()
    compiled, found = fp16(model, compiler="inductor"), []
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for scale in SCALES:
        set_scale(compiled, scale)
        optimizer.zero_grad()
        (compiled(x).square().sum() / 4).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other, truth in zip(*found, exact.parameters(), strict=True):
        assert relative_error(one, truth.grad) < BOUND
        assert torch.equal(one, other)
    before, runtime = copies(model), mpcompile.runtime(compiled)
    optimizer.zero_grad()
    (compiled(x) * 1e6).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, copies(model)))
    assert runtime.last_step_skipped
    # The bias of the last layer is summed in fp32, where 4e6 * 2^12 is no overflow.
    assert runtime.overflowed == ("first.weight", "first.bias", "last.weight")
    assert runtime.scale == SCALES[1] / 2


PROCESS = """
import json, sys, torch, mpcompile
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())

model, x = Net(), torch.linspace(-1, 1, 40).view(5, 8)
options = {"dtype": "fp16", "loss_scale": {"init_scale": float(sys.argv[1])}}
compiled = torch.compile(model, backend="mixprec", options=options)
runtime, optimizer = mpcompile.runtime(compiled), torch.optim.AdamW(model.parameters(), 1e-2)
steps = []
for factor in (1e-6, 1e6):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    (compiled(x).sum() * factor).backward()
    gradients = [p.grad.tolist() for p in model.parameters()]
    optimizer.step()
    stayed = all(map(torch.equal, before, model.parameters()))
    steps.append((stayed, runtime.last_step_skipped, runtime.scale, runtime.overflowed))
    if factor < 1:
        small = gradients
(report,) = mpcompile.reports(compiled)
print(json.dumps({
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
    "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
    "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
    "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
    "report": report.to_json(),
    "steps": steps,
    "gradients": small,
}))
"""


def process(folder: Path, scale: float) -> dict[str, Any]:
    """Train two steps in a new process, of which the second overflows, with a cache of its own."""
    (folder / "train.py").write_text(PROCESS)
    result = subprocess.run(
        [sys.executable, str(folder / "train.py"), str(scale)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.inductor
def test_a_second_process_starts_warm_scales_skips_and_names(tmp_path: Path) -> None:
    cold, warm = process(tmp_path, 2.0**16), process(tmp_path, 2.0**14)
    assert (cold["aot_misses"], cold["aot_hits"], cold["bypasses"]) == (1, 0, 0)
    assert (warm["aot_misses"], warm["aot_hits"], warm["bypasses"]) == (0, 1, 0)
    assert (cold["fx_misses"] > 0, warm["fx_misses"]) == (True, 0)
    # The scale is no part of the cached code: the second process has another, and the same gradients.
    assert warm["gradients"] == cold["gradients"]
    overflowed = ["first.weight", "first.bias", "last.weight"]
    assert cold["steps"] == [[False, False, 2.0**16, []], [True, True, 2.0**15, overflowed]]
    assert warm["steps"] == [[False, False, 2.0**14, []], [True, True, 2.0**13, overflowed]]
    assert "gradient_flags" in graph_of(mpcompile.Report.from_json(warm["report"]))
    assert warm["report"] == cold["report"]
