"""The examples run as a user runs them, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str, cwd: Path) -> str:
    name, *rest = arguments
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *rest], cwd=cwd, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_apply_passes(tmp_path: Path) -> None:
    output = run("apply_passes.py", cwd=tmp_path)
    assert "insert_casts changes: " in output
    assert "low form of" in output
    assert "torch.bfloat16" in output
    rows = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]
        if len(cells) == 3 and "e-" in cells[2]:
            rows[cells[0]] = float(cells[2])
    assert set(rows) == {"fp32", "bf16", "bf16, `head` in fp32"}
    assert rows["fp32"] < 1e-6 < rows["bf16"] < 0.05
    assert rows["bf16, `head` in fp32"] < rows["bf16"] * 1.5


@pytest.mark.inductor
def test_train_fp16_shows_what_scaling_does(tmp_path: Path) -> None:
    output = run("train_fp16.py", "--steps=30", cwd=tmp_path)
    assert "step 29 skipped: True; not finite: waves.weight" in output
    rows = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 4 and cells[1] != "first loss":
            rows[cells[0]] = (float(cells[1]), float(cells[2]), cells[3])
    assert set(rows) == {"fp32", "fp16, loss_scale=None", "fp16"}
    first, truth, _ = rows["fp32"]
    assert truth < 0.5 * first
    assert abs(rows["fp16"][1] - truth) < 0.02 * truth
    assert rows["fp16, loss_scale=None"][1] > 0.7 * first  # its gradients are zero
    assert (rows["fp16"][2], rows["fp16, loss_scale=None"][2]) == ("1", "0")


@pytest.mark.inductor
def test_train_gpt_with_the_smallest_sizes(tmp_path: Path) -> None:
    sizes = {"steps": 2, "layers": 1, "width": 32, "context": 8, "batch": 2}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    output = run("train_gpt.py", "--quick", *arguments, "--out", str(tmp_path / "loss.png"), cwd=tmp_path)
    for method in ("fp32", "autocast", "mixprec"):
        assert any(line.strip("│┃ ").startswith(method) for line in output.splitlines()), method
    assert "mixprec: 1 graph" in output
    assert "matmuls, convolutions and attentions run low" in output
    chart = tmp_path / "loss.png"
    assert chart.exists() or "No chart: install matplotlib" in output
