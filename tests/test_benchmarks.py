"""The pure parts of the benchmark: means, ratios, JSON, tables, the plot, the table of workloads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import hardware, table
from benchmarks.__main__ import main
from benchmarks.peers import BASELINE, MIXPREC, mixprec_options
from benchmarks.plot import plot
from benchmarks.results import Measurement, Result, Run, geometric_mean
from benchmarks.workloads import SIZES, Workload, workloads


def measurement(step_ms: float = 1.0, **figures: Any) -> Measurement:
    known = {
        "first_step_s": 1.0,
        "saved_bytes": 100,
        "peak_bytes": None,
        "errors": (0.5,),
        "casts": 1,
        "cast_bytes": 6,
    }
    return Measurement(step_ms=step_ms, **{**known, **figures})


def result(name: str, ours: Measurement, theirs: Measurement, training: bool = True) -> Result:
    others = {peer: measurement() for peer in table.PEERS}
    peers = {**others, MIXPREC: ours, BASELINE: theirs}
    return Result(workload=name, training=training, peers=peers, gemm_fp32_ms=0.5, gemm_low_ms=0.25)


@pytest.fixture
def run() -> Run:
    """Ratios of time 2, 8 and, in inference, 100; of saved bytes 0.5 and 0.125."""
    return Run(
        command="python -m benchmarks",
        dtype="bf16",
        preset="default",
        device="cpu",
        rounds=15,
        seeds=[0, 1],
        versions=hardware.versions(),
        hardware=hardware.describe(torch.device("cpu")),
        results=[
            result("first, long", measurement(2.0, saved_bytes=50, errors=(0.1, 0.4)), measurement(errors=(0.1, 0.1))),
            result("second", measurement(8.0, saved_bytes=25), measurement(saved_bytes=200)),
            result(
                "inference, batch 1",
                measurement(100.0, saved_bytes=None, errors=(math.inf,)),
                measurement(saved_bytes=None, casts=None, cast_bytes=None),
                training=False,
            ),
        ],
    )


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.0, 8.0]) == 0.0
    # Their product is no longer a float; logarithms of such numbers cost a few digits.
    assert geometric_mean([1e-300, 1e-300, 1e-300]) == pytest.approx(1e-300, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("values", [[], [1.0, -1.0]])
def test_geometric_mean_of_nothing_or_negatives_is_an_error(values: list[float]) -> None:
    with pytest.raises(ValueError, match="not negative"):
        geometric_mean(values)


def test_ratios_are_against_the_baseline(run: Run) -> None:
    first, _, inference = run.results
    assert first.ratio("step_ms", MIXPREC) == 2.0
    assert first.ratio("step_ms", BASELINE, against=MIXPREC) == 0.5
    assert first.ratio("error", MIXPREC) == pytest.approx(2.0)  # geometric mean of 1 and 4
    assert inference.ratio("saved_bytes", MIXPREC) is None
    assert inference.ratio("casts", MIXPREC) is None


def test_mean_ratios_leave_inference_out(run: Run) -> None:
    assert run.mean_ratio("step_ms", MIXPREC) == pytest.approx(4.0)
    assert run.mean_ratio("saved_bytes", MIXPREC) == pytest.approx(0.25)
    assert run.mean_ratio("peak_bytes", MIXPREC) is None


def test_json_round_trip(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run.write(path)
    assert Run.read(path) == run
    data = json.loads(path.read_text(), parse_constant=pytest.fail)  # "Infinity" is no JSON
    assert data["results"][2]["peers"][MIXPREC]["errors"] == ["inf"]
    assert data["results"][2]["peers"][MIXPREC]["saved_bytes"] is None
    assert set(data["versions"]) == {"python", "torch", "mpcompile"}
    assert {"cpu", "threads", "gpu", "native_bf16", "native_fp16"} <= set(data["hardware"])


def test_tables_show_ratios_and_means(run: Run) -> None:
    assert rows(table.times(run))["second"][:2] == ["8.0", "1.0"]
    shown = rows(table.ratios(run))
    assert shown["geometric mean, training"][:3] == ["4.00", "0.25", "1.41"]
    assert shown["inference, batch 1"][:3] == ["100.00", "-", "inf"]
    assert rows(table.memory(run))["second"][0] == "-"
    assert rows(table.starts(run))["second"][0] == "-"


def rows(shown: Table) -> dict[str, list[str]]:
    """The cells of a table by their row's first one."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    lines = [line.split("│")[1:-1] for line in captured.get().splitlines() if line.startswith("│")]
    return {first.strip(): [cell.strip() for cell in others] for first, *others in lines}


def test_the_plot_is_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot(run, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_machine_without_the_type_is_told_apart() -> None:
    assert hardware.caveat("bf16", {"native_bf16": True}) is None
    assert "slow fp16 kernels" in str(hardware.caveat("fp16", {"native_fp16": False}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "No workload's name contains 'nothing'; there are: GPT, "),
        (["--json", "no/such/folder/run.json"], "there is no folder no/such/folder"),
        (["--rounds", "0"], "must be at least 1"),
    ],
)
def test_the_command_line_refuses(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert message in f"{error.value}{capsys.readouterr().err}"


def test_mixprec_options() -> None:
    by_name = {workload.name: workload for workload in workloads("cpu")}
    assert mixprec_options(by_name["GPT"], "bf16", "default") == {"dtype": "bf16"}
    assert mixprec_options(by_name["MLP, 8 micro-batches"], "fp16", "fast") == {
        "dtype": "fp16",
        "weight_cache": True,
        "policy": "fast",
    }


@pytest.mark.parametrize("device", SIZES)
@pytest.mark.parametrize("index", range(len(workloads("cpu"))), ids=[w.name for w in workloads("cpu")])
def test_models_take_their_inputs_at_all_sizes(device: str, index: int) -> None:
    workload: Workload = workloads(device)[index]
    with torch.device("meta"):  # shapes only: what fills a GPU needs no memory here
        model, inputs = workload.model(), workload.inputs()
        output = model(*inputs)
    assert output.dtype == torch.float32
    assert (output.shape == ()) == workload.training
    if workload.training:
        output.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
