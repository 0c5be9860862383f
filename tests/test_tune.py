"""``tune``: the rules it finds, the policy it returns, and how it goes on after an interruption."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from examples.gpt import Shape
from examples.gpt import build as build_gpt
from mpcompile import MixprecError, Policy
from mpcompile.tuning import evaluation
from mpcompile.tuning.scale_advice import scale_range
from tests.helpers import Net

BF16 = {"dtype": "bf16"}
PLANTED = (1, 4, 6)


class Shifted(nn.Linear):
    """A layer whose operand is far from zero: the shift is taken away again, but not what rounding did to it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 64) - 64 * self.weight.sum(1)


class Deep(nn.Module):
    """A residual stream through linear layers, some of them sensitive."""

    def __init__(self, depth: int, planted: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Shifted if i in planted else nn.Linear)(32, 32) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.3 * layer(x).tanh()
        return x.square().mean()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Policy, Path]:
    torch.manual_seed(0)
    model, state = Deep(8, PLANTED), tmp_path_factory.mktemp("tune") / "state.json"
    policy = mpcompile.tune(model, [torch.randn(64, 32)], options=BF16, state=state, progress=False)
    return model, policy, state


def test_it_finds_exactly_the_sensitive_layers(tuned: tuple[nn.Module, Policy, Path]) -> None:
    _, policy, state = tuned
    assert set(policy.fp32) == {f"layers.{i}" for i in PLANTED}
    assert len(json.loads(state.read_text())["measured"]) <= 25


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_finds_three_among_two_hundred(dtype: str, tmp_path: Path) -> None:
    model, planted = Deep(67, (7, 30, 55)), {"layers.7", "layers.30", "layers.55"}
    state, x = tmp_path / "state.json", torch.randn(64, 32)
    report = mpcompile.explain(model, x, options={"dtype": dtype})
    assert len([node for node in report.matmuls() if node.precision == "low"]) == 200
    # What fp16 does to the planted layers is an eighth of what bf16 does.
    tolerance = {"bf16": 0.02, "fp16": 0.0025}[dtype]
    options = {"dtype": dtype}
    batches = [x, torch.randn(64, 32)]
    policy = mpcompile.tune(model, batches, options=options, tolerance=tolerance, state=state, progress=False)
    assert set(policy.fp32) == planted
    assert len(json.loads(state.read_text())["measured"]) <= 25


def test_the_policy_meets_the_tolerance_on_other_batches(tuned: tuple[nn.Module, Policy, Path]) -> None:
    model, policy, _ = tuned
    x = torch.randn(64, 32)
    assert mpcompile.compare(model, x, options={"policy": policy}).error < 0.02


def test_the_file_carries_the_evidence_and_is_an_option(tuned: tuple[nn.Module, Policy, Path], tmp_path: Path) -> None:
    model, policy, _ = tuned
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("tolerance 2.00e-02, objective time" in line for line in comments)
    for i in PLANTED:
        assert any(f"layers.{i}: without it" in line for line in comments)
    assert Policy.from_toml(path) == policy
    assert policy.digest == Policy(fp32=policy.fp32).digest
    report = mpcompile.explain(model, torch.randn(64, 32), options={"policy": str(path)})
    kept = {node.module for node in report.matmuls() if node.precision == "fp32"}
    assert kept == {f"layers.{i}" for i in PLANTED}


def test_it_goes_on_where_it_was(
    tuned: tuple[nn.Module, Policy, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, policy, finished = tuned
    torch.manual_seed(0)
    Deep(8, PLANTED)
    batches = [torch.randn(64, 32)]

    def measure(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(evaluation.Trial, "evaluate", measure)
    state = tmp_path / "state.json"
    state.write_text(finished.read_text())
    again = mpcompile.tune(model, batches, options=BF16, state=state, progress=False)
    assert again == policy
    assert again.notes == policy.notes
    with pytest.raises(ValueError, match="is the state of another model, other batches or options"):
        mpcompile.tune(model, batches, options={"dtype": "fp16"}, state=state, progress=False)
    state.write_text("{}")
    with pytest.raises(ValueError, match=r"is no state of mpcompile\.tune"):
        mpcompile.tune(model, batches, options=BF16, state=state, progress=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_gpt_of_the_demo_needs_nothing(dtype: str) -> None:
    model = build_gpt(Shape(layers=1, width=32, context=16), 0, torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 17))
    policy = mpcompile.tune(model, [(tokens[:, :-1], tokens[:, 1:])], options={"dtype": dtype}, progress=False)
    assert policy.fp32 == ()
    assert "Nothing needs fp32." in policy.notes
    advice = [note for note in policy.notes if note.startswith("loss scale: from")]
    assert len(advice) == (dtype == "fp16")


def test_a_value_that_overflows_is_kept_in_fp32() -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().square() * 1e6).square().mean() * 1e-12

    policy = mpcompile.tune(Large(), [torch.randn(16, 8)], options={"dtype": "fp16"}, progress=False)
    assert policy.fp32 == ("last",)


def test_a_tolerance_that_no_rules_reach() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.bfloat16().float())

    with pytest.raises(MixprecError, match=r"cannot meet tolerance=1e-06: .*the error is still .*compare\(model"):
        mpcompile.tune(Own(), [torch.randn(16, 8)], tolerance=1e-6, options=BF16, progress=False)


def test_arguments_that_make_no_sense() -> None:
    model, batch = Net(), torch.randn(4, 8)
    for message, arguments in {
        "at least one batch": {"batches": []},
        "between 0 and 1": {"tolerance": 0.0},
        "'time', 'memory'": {"objective": "speed"},
        "max_evaluations": {"max_evaluations": 0},
        "give those instead of a Policy": {"options": {"policy": Policy()}},
    }.items():
        with pytest.raises(ValueError, match=message):
            mpcompile.tune(model, **{"batches": [batch], "options": BF16, **arguments})  # type: ignore[arg-type]
    with pytest.raises(MixprecError, match="nothing to tune"):
        mpcompile.tune(model, [batch], options={"policy": "fp32"})


def test_the_range_of_loss_scales() -> None:
    from collections import Counter

    assert scale_range(Counter()) is None
    # 2^-10 must stay below 2^16; of 1000 values the ten smallest may vanish, and 2^-30 must reach 2^-24.
    exponents = Counter({-10: 1, -20: 500, -30: 489, -60: 10})
    assert scale_range(exponents) == (2.0**6, 2.0**25)


def test_costs_are_work_or_bytes() -> None:
    layer = nn.Linear(64, 32, bias=False)
    found = {}
    for objective in ("time", "memory"):
        trial = evaluation.Trial(layer, [evaluation.Batch.of(torch.randn(16, 64))], BF16, None, objective)
        found[objective] = sum(trial.evaluate(()).costs.values())
    assert found["time"] == 2 * (2 * 16 * 64 * 32)  # forward and the weight's gradient; the input has none
    assert found["memory"] == 2 * (16 * 64 + 64 * 32 + 16 * 32)
