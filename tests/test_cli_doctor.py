"""``doctor``: what it says of the machine, and that it finds each thing a model can lose, and nothing else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mpcompile.cli import machine
from mpcompile.cli.command import FINDING, OK, USAGE
from mpcompile.cli.eager_matmuls import EagerMatmul, matmuls_outside
from mpcompile.execution.fp32_matmul import fp32_matmul_precision
from mpcompile.inspection.explain import explain
from tests.cli_tools import MODEL, call, folder_with

LOSING = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.memory, self.head = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8)

    @torch.compiler.disable
    def hidden(self, x):
        return x @ self.body.weight  # outside

    def forward(self, x):
        x = self.body(x)
        x = self.hidden(x)
        return self.head(self.memory(x)[0])


def outside():
    return Net(), (torch.randn(4, 8),)


def with_weights(value):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = value
    return model, (torch.randn(4, 8),)


def wide():
    return with_weights(1e5)


def broken():
    return with_weights(float("nan"))


def in_bf16():
    return nn.Linear(8, 4).bfloat16(), (torch.randn(4, 8).bfloat16(),)


def ranked():
    codebook, head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 4)

    def f(x):
        return head(codebook[(x @ codebook).argmin(-1)])

    return f, (torch.randn(4, 8),)


@torch.library.custom_op("doctor::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def custom():
    head = nn.Linear(8, 4).requires_grad_(False)
    return (lambda x: head(twice(x))), (torch.randn(4, 8),)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    with folder_with({"model.py": MODEL, "losing.py": LOSING}, tmp_path):
        yield


def diagnose(target: str, *options: str) -> tuple[int, list[str]]:
    """Exit code, and a line for each finding: ``LOOK topic: text`` or ``note ...``."""
    run = call("doctor", target, "--dtype", *(options or ("bf16",)), "--json", "-")
    found = json.loads(run.out)["findings"]
    return run.code, [f"{'note' if each['is_note'] else 'LOOK'} {each['topic']}: {each['text']}" for each in found]


def test_a_plain_model_loses_nothing() -> None:
    assert diagnose("model.py:make") == (OK, [])
    run = call("doctor", "model.py:make")  # auto: in bf16 whatever the device
    assert run.code == OK
    assert "low type bfloat16" in run.out
    assert run.out.rstrip().endswith("Nothing is lost.")


def test_work_outside_the_graphs_is_found() -> None:
    code, found = diagnose("losing.py:outside")
    assert code == FINDING
    line = 1 + LOSING.splitlines().index("        return x @ self.body.weight  # outside")
    here = Path("losing.py").resolve()
    assert found[0].startswith("LOOK warning: Dynamo does not capture recurrent modules: 'memory' run in float32")
    breaks = [text for text in found if text.startswith("LOOK graph break")]
    assert len(breaks) == 2
    assert "Skip inlining `torch.compiler.disable()`d function" in breaks[0]
    assert "RNN" in breaks[1]
    outside = [text.rpartition("fp32: ")[2] for text in found if text.startswith("LOOK outside")]
    assert outside[0] == f"the model itself, {here}:{line}"
    assert [text.partition(",")[0] for text in outside[1:]] == ["head"]


def test_the_table_of_findings_says_the_way_out_once() -> None:
    run = call("doctor", "losing.py:outside", "--dtype", "bf16")
    assert (run.code, run.err) == (FINDING, "")
    assert run.out.count("TORCH_LOGS=graph_breaks") == 1
    assert "LOOK  outside: " in run.out
    assert "low type bfloat16" in run.out


def test_weights_that_fp16_cannot_hold() -> None:
    wide = "parameters: beyond fp16's range of 65504: 0.weight (up to 100000)"
    assert diagnose("losing.py:wide") == (OK, [f"note {wide}"])
    code, found = diagnose("losing.py:wide", "fp16")
    assert code == FINDING
    assert found[0] == f"LOOK {wide}"
    assert found[1].startswith("LOOK fp32: 1 of 5 products stay in fp32: parameter '0.weight' holds values beyond")


def test_weights_that_are_not_finite() -> None:
    code, found = diagnose("losing.py:broken")
    assert code == FINDING
    assert found[0] == "LOOK parameters: not finite: 0.weight"
    assert found[1].startswith("LOOK not finite: 0.weight, which enters forward, is not finite already")


def test_values_that_fp16_cannot_hold() -> None:
    Path("huge.py").write_text(MODEL.replace("self.norm(self.body(x))", "self.norm(self.body(x * 1e5))"))
    assert diagnose("huge.py:make") == (OK, [])
    code, found = diagnose("huge.py:make", "fp16")
    assert code == FINDING
    assert found[0].startswith("LOOK not finite: The first value of forward that is not finite is ")
    assert "options={'fp32': [" in found[0]


def test_a_loss_scale_that_must_fall_is_a_note() -> None:
    Path("steep.py").write_text(MODEL.replace("* scale", "* 30.0"))
    code, (found,) = diagnose("steep.py:make", "fp16")
    assert code == OK
    assert found.startswith("note not finite: The first value of backward that is not finite")
    assert "training skips steps until the scale has fallen there" in found


def test_a_model_that_returns_no_floating_point_tensor() -> None:
    Path("tokens.py").write_text(MODEL.replace("* scale", ".argmax(-1)"))
    code, (found,) = diagnose("tokens.py:make")
    assert code == OK
    assert "only compared or ranked" in found


def test_sixteen_bit_weights_without_masters() -> None:
    code, found = diagnose("losing.py:in_bf16")
    assert code == FINDING
    assert "2 trained parameters are bfloat16: they have no float32 master copy" in found[0]


def test_what_is_kept_by_design_is_a_note() -> None:
    code, found = diagnose("losing.py:ranked")
    assert code == OK
    assert [text for text in found if "only compared or ranked" in text] == found
    assert found[0].startswith("note fp32: 1 of ")


def test_custom_operators_are_named_with_how_to_register_them() -> None:
    run = call("doctor", "losing.py:custom", "--dtype", "bf16")
    assert run.code == OK
    assert "note  operators: 1 x doctor.twice.default has no known low form and sees fp32 as traced" in run.out
    assert "mpcompile.register_op('doctor::twice', 'low')" in run.out


def test_rules_that_match_nothing_are_bad_usage() -> None:
    run = call("doctor", "model.py:make", "--dtype", "bf16", "--fp32", "hed")
    assert (run.code, run.out) == (USAGE, "")
    assert "Rule 'hed' matches no module" in run.err


def test_a_model_that_nothing_is_captured_of() -> None:
    Path("opaque.py").write_text(
        "import torch\nhead = torch.nn.Linear(3, 3)\n@torch.compiler.disable\ndef f(x):\n    return head(x)\n"
        "def make():\n    return (lambda x: f(x)), (torch.ones(3),)\n"
    )
    code, found = diagnose("opaque.py:make")
    assert code == FINDING
    assert found[0].startswith("LOOK warning: Dynamo captured no graph")
    assert found[1].startswith("LOOK graph break: ")
    assert [text for text in found if text.startswith("LOOK outside")] == found[2:]
    assert f"the model itself, {Path('opaque.py').resolve()}:5" in found[2]


def test_the_machine() -> None:
    run = call("doctor")
    assert run.code == OK
    assert run.out.splitlines()[0].strip() == "versions"
    assert torch.__version__ in run.out
    assert "supported: 2.11 or newer is needed" in run.out
    assert re.search(r"entry point +yes", run.out)
    assert f"cpu ({torch.backends.cpu.get_cpu_capability()}, 1 threads)" in run.out
    facts = json.loads(call("doctor", "--json", "-").out)
    assert facts["findings"] is None
    assert {fact["topic"] for fact in facts["machine"]} == {"versions", "devices", "settings", "installed"}


def test_settings_are_those_in_force() -> None:
    def settings() -> dict[str, tuple[str, str]]:
        return {fact.name: (fact.value, fact.comment) for fact in machine.facts() if fact.topic == "settings"}

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        for allowed, comment in ((False, "fp32 sums"), (True, "sums in 16 bits")):
            matmul.allow_bf16_reduced_precision_reduction = allowed
            assert settings()["cuda.matmul.allow_bf16_reduced_precision_reduction"] == (str(allowed), comment)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    for precision, comment in (("tf32", "fp32 is rounded"), ("ieee", "true fp32")):
        with fp32_matmul_precision(precision):
            assert settings()["mkldnn.matmul.fp32_precision"] == (precision, comment)
            assert settings()["cuda.matmul.fp32_precision"] == (precision, comment)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.11.0", True), ("2.13.0+cpu", True), ("3.0.0a0+git", True), ("2.9.1", False), ("2.10.0", False)],
)
def test_supported_versions(version: str, fits: bool) -> None:
    assert machine.is_supported(version) is fits


def test_a_torch_that_is_too_old_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OLDEST_TORCH", (99, 0))
    run = call("doctor")
    assert run.code == FINDING
    assert "too old: 99.0 or newer is needed" in run.out


def test_every_accelerator_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    facts = [(fact.name, fact.value, fact.comment) for fact in machine.facts() if fact.topic == "devices"]
    assert facts[1:] == [
        ("cuda:0 (GPU 0, capability 7.5)", "bf16 emulated, fp16 native", "dtype='auto' is fp16"),
        ("cuda:1 (GPU 1, capability 9.0)", "bf16 native, fp16 native", "dtype='auto' is bf16"),
    ]


class Stack(nn.Module):
    """Modules of torch alone, and one product of its own: lines tell the second, modules the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(3, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) @ self.layers[0].weight


def test_what_the_graphs_hold_is_not_outside() -> None:
    for model in (Stack(), Stack().layers):
        report = explain(model, torch.randn(2, 3, 8), options={"dtype": "bf16"})
        assert matmuls_outside(model, (torch.randn(2, 3, 8),), {}, report) == []


def test_modules_tell_what_lines_do_not() -> None:
    x = torch.randn(2, 3, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    report = explain(model[:1], x, options={"dtype": "bf16"})
    assert matmuls_outside(model, (x,), {}, report) == [EagerMatmul("1", "")]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
