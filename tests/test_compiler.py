"""What is in the compile cache key, that the executors agree, and that a second process starts warm."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile import backend, joint_pass
from mpcompile.joint_pass import JointPass
from mpcompile.passes import op_classes
from tests.process_tools import assert_warm, train_in_process
from tests.test_programs import BOUND, mixprec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).softmax(-1)


class Pinned(Net):
    """The same but for one island."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.first(x)
        return self.last(self.norm(x).relu()).softmax(-1)


def key(monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, **options: Any) -> tuple[Any, ...]:
    """The cache key of the pass that a model is compiled with."""
    keys: list[tuple[Any, ...]] = []
    compile_graph = backend._compile

    def watching(graph: Any, inputs: Any, joint: JointPass, *rest: Any) -> Any:
        keys.append(joint.uuid())
        return compile_graph(graph, inputs, joint, *rest)

    monkeypatch.setattr(backend, "_compile", watching)
    torch._dynamo.reset()
    mixprec(model or Net(), **options)(torch.randn(3, 8))
    monkeypatch.undo()
    return keys[0]


DIFFERENT: list[dict[str, Any]] = [
    {"dtype": "fp16", "loss_scale": None},
    {"dtype": "fp16"},
    {"fp32": ["first"]},
    {"fp32": ["last"]},
    {"fp32": ["last@dgrad"]},
    {"fp32": ["last@wgrad"]},
    {"fp32": ["op:softmax@forward"]},
    {"policy": "accurate"},
    {"policy": "fast"},
    {"policy": "torch"},
    {"fp32": ["op:softmax"]},
    {"fp32": ["param:first.weight"]},
    {"low": ["op:softmax"]},
    {"low": ["norm"]},
    {"fp32_matmul": "ieee"},
    {"numerics": "strict"},
    {"compiler": "reference"},
    {"model": Pinned()},
]


def test_every_option_and_mark_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(monkeypatch)] + [key(monkeypatch, **options) for options in DIFFERENT]
    assert len(set(keys)) == len(keys) == len(DIFFERENT) + 1


def _set_precision() -> None:
    torch.set_float32_matmul_precision("high")


def _set_flag(name: str) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, name, not getattr(torch.backends.cuda.matmul, name))


FLAGS = [
    _set_precision,
    _set_flag("allow_bf16_reduced_precision_reduction"),
    _set_flag("allow_fp16_reduced_precision_reduction"),
    _set_flag("allow_fp16_accumulation"),
]


@pytest.fixture
def flags() -> Any:
    """Put the process's matmul settings back."""
    names = [f"allow_{name}" for name in ("bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction")] + [
        "allow_fp16_accumulation"
    ]
    matmul = torch.backends.cuda.matmul
    before, precision = {name: getattr(matmul, name) for name in names}, torch.get_float32_matmul_precision()
    backends = (matmul, torch.backends.mkldnn.matmul)
    newer = [which.fp32_precision for which in backends]
    yield
    torch.set_float32_matmul_precision(precision)
    for which, value in zip(backends, newer, strict=True):
        which.fp32_precision = value
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("change", FLAGS)
def test_settings_that_change_what_a_matmul_accumulates_in_are_in_the_key(change: Callable[[], None]) -> None:
    before = joint_pass._reduced_precision_flags()
    change()
    assert joint_pass._reduced_precision_flags() != before


def test_a_registered_op_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(monkeypatch)
    op_classes._registered["mylib::anything"] = op_classes.OpClass.LOW
    assert key(monkeypatch) != before


def test_the_source_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(monkeypatch)
    assert joint_pass._source_hash() in before
    assert len(joint_pass._source_hash()) == 64


def test_the_key_is_stable_and_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = key(monkeypatch, fp32=["last"]), key(monkeypatch, fp32=["last"])
    assert first == second
    assert pickle.loads(pickle.dumps(first)) == first
    assert str(pickle.loads(pickle.dumps(first))) == str(first)


@pytest.mark.parametrize("model", [Net, Pinned])
def test_reference_and_aot_eager_agree_bitwise(model: type[nn.Module]) -> None:
    x, found = torch.randn(5, 8), []
    for name in ("reference", "aot_eager"):
        torch.manual_seed(1)
        net = model()
        output = mixprec(net, compiler=name)(x)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 7
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("hook", ["joint_custom_pre_pass", "joint_custom_post_pass"])
def test_the_hook_of_ours_cannot_be_an_option_as_well(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointPass, "runs_after_patterns", lambda self, inputs: hook.endswith("post_pass"))
    compiled = mixprec(nn.Sequential(nn.Linear(8, 4)), compiler="inductor", inductor={hook: None})
    with pytest.raises(Exception, match=f"{hook} is where mixprec runs"):
        compiled(torch.randn(3, 8))


PROCESS = """
compiled = torch.compile(model, backend="mixprec", options=json.loads(sys.argv[1]))
output = compiled(x)
output.sum().backward()
(report,) = mpcompile.reports(compiled)
truth = model.double()(x.double())
error = float((output.double() - truth).norm() / truth.norm())
answer(report=report.to_json(), error=error, output=output.tolist())
"""


def process(folder: Path, **options: Any) -> dict[str, Any]:
    """Train a step in a new process."""
    return train_in_process(folder, PROCESS, json.dumps({"dtype": "bf16", **options}))


@pytest.mark.inductor
def test_a_second_process_starts_warm_and_has_its_report(tmp_path: Path) -> None:
    cold, warm = process(tmp_path), process(tmp_path)
    assert_warm(cold, warm)
    assert mpcompile.Report.from_json(warm["report"]) == mpcompile.Report.from_json(cold["report"])
    assert warm["output"] == cold["output"]
    # Another rule, another dtype: the cache has nothing for them, and what they compute is their own.
    ruled = process(tmp_path, fp32=["first", "param:last.weight"])
    half = process(tmp_path, dtype="fp16", loss_scale=None)
    assert [other["aot_hits"] for other in (ruled, half)] == [0, 0]
    assert cold["error"] < BOUND
    assert half["error"] < cold["error"] / 2
    assert ruled["error"] < 1e-6 < half["error"]


class Written(nn.Module):
    """Attention that a model writes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


@pytest.mark.parametrize(
    ("rules", "fused_first"), [([], True), (["op:softmax"], False), (["op:bmm"], False), (["op:layer_norm"], False)]
)
def test_what_fused_attention_would_swallow_keeps_it_from_being_fused(
    rules: list[str], fused_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[JointPass] = []
    compile_graph = backend.compile_with_aot_eager
    monkeypatch.setattr(
        backend, "compile_with_aot_eager", lambda gm, ins, joint: passes.append(joint) or compile_graph(gm, ins, joint)
    )
    x = torch.randn(2, 3, 4, requires_grad=True)
    mixprec(Written(), fp32=rules)(x).sum().backward()
    assert [joint.runs_after_patterns([x]) for joint in passes] == [fused_first]
