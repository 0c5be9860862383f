"""The command line: exit codes, help whose examples run, JSON, and what each command says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpcompile
from mpcompile.cli import peers
from mpcompile.cli.command import FINDING, OK, USAGE, Command
from mpcompile.cli.main import COMMANDS
from mpcompile.inspection.report import Report
from tests.cli_tools import MODEL, call, folder_with

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with folder_with({"model.py": MODEL}, tmp_path):
        yield tmp_path


def test_help_lists_the_commands() -> None:
    helped = call("--help")
    assert helped.code == OK
    assert all(f"    {command.name}" in helped.out and command.name in helped.out for command in COMMANDS)
    assert "exit codes: 0 done" in helped.out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_ends_with_an_example(command: Command) -> None:
    helped = call(command.name, "--help")
    assert helped.code == OK
    last = helped.out.rstrip().splitlines()[-1]
    assert last == f"example: python -m mpcompile {command.example}"
    assert command.example.split()[0] == command.name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_examples_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "COMPILER", "aot_eager")  # generating code takes a minute
    run = call(*command.example.split())
    written = "wrote policy.toml\n" if "--out" in command.example else ""
    assert (run.code, run.err) == (OK, written)
    assert run.out.strip()


def test_as_a_module_of_python(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mpcompile", "explain", "modle.py:make", "--json=-"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert result.stderr.startswith("mpcompile explain: There is no file 'modle.py'")


def test_a_reader_that_has_seen_enough_gets_no_traceback(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mpcompile", "doctor", "--json=-"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("explian model.py:make", "invalid choice: 'explian'"),
        ("explain", "the following arguments are required: TARGET"),
        ("explain model.py:mak", "there is no 'mak'"),
        ("explain model.py:make --dtype bf8", "Option `dtype` must be one of 'auto', 'bf16', 'fp16'; got 'bf8'"),
        ("explain model.py:make --policy defualt", "Did you mean 'default'?"),
        ("explain model.py:make --policy no.toml", "no.toml"),
        ("explain model.py:make --dtype bf16 --fp32 op:sofmax", "Rule 'op:sofmax' matches no operator"),
        ("explain model.py:make --dtype bf16 --low heads", "Rule 'heads' matches no module"),
        ("explain model.py:make --dtype bf16 --json no/where.json", "'no/where.json' cannot be written: No such file"),
        ("bench model.py:make --dtype bf16 --rounds 0", "'0' is no count; give 1 or more"),
        ("tune model.py:make --dtype bf16 --tolerance 2", "'2' is no relative error; give a number between 0 and 1"),
        ("tune model.py:make --dtype bf16 --tolerance little", "'little' is no relative error"),
        ("tune model.py:make --policy torch --dtype bf16", "give those instead of a Policy or policy='torch'"),
        ("bench model.py:make --policy fp32", "nothing to measure in fp32; give --dtype bf16"),
    ],
)
def test_what_cannot_be_done_ends_with_2(arguments: str, message: str) -> None:
    run = call(*arguments.split())
    assert run.code == USAGE
    assert message in run.err
    assert "Traceback" not in run.err


def test_explain_shows_the_report_and_takes_the_options() -> None:
    run = call(
        "explain", "model.py:make", "--dtype", "fp16", "--fp32", "head", "--fp32", "norm", "--policy", "accurate"
    )
    assert (run.code, run.err) == (OK, "")
    assert "low type float16, policy accurate" in run.out
    assert "kept in fp32: 3 x rule 'head'" in run.out
    run = call("explain", "model.py:make", "--dtype", "bf16", "--low", "norm")
    assert "rule 'norm'" in run.out


def test_explain_writes_json(folder: Path) -> None:
    alone = call("explain", "model.py:make", "--dtype", "bf16", "--json", "-")
    report = Report.from_json(alone.out)
    assert {node.module for node in report.matmuls()} == {"body", "head"}
    beside = call("explain", "model.py:make", "--dtype", "bf16", "--json", "report.json")
    assert "low type bfloat16" in beside.out
    assert beside.err == "wrote report.json\n"
    assert Report.from_json((folder / "report.json").read_text()) == report


def test_what_a_model_prints_is_no_json() -> None:
    Path("loud.py").write_text(MODEL.replace("def make():", "print('importing')\n\ndef make():\n    print('making')"))
    run = call("explain", "loud.py:make", "--dtype", "bf16", "--json", "-")
    assert run.err == "importing\nmaking\n"
    assert json.loads(run.out)["dtype"] == "bfloat16"


def test_the_users_traceback_is_shown_and_ours_is_not() -> None:
    Path("raising.py").write_text("def make():\n    raise KeyError('deep down')\n")
    run = call("explain", "raising.py:make", "--dtype", "bf16")
    assert run.code == USAGE
    assert "    raise KeyError('deep down')" in run.err
    assert run.err.endswith("mpcompile explain: make() of 'raising.py' raised KeyError: 'deep down'\n")
    assert "cli" not in run.err


def test_warnings_are_one_line_each() -> None:
    run = call("explain", "model.py:make", "--policy", "accurate")
    assert run.code == OK
    (line,) = run.err.splitlines()
    assert line.startswith("MixprecWarning: mixprec leaves this model in float32")


def test_a_model_that_nothing_is_captured_of_is_a_finding() -> None:
    Path("opaque.py").write_text(
        "import torch\n@torch.compiler.disable\ndef f(x):\n    return x + 1\n"
        "def make():\n    return (lambda x: f(x)), (torch.ones(3),)\n"
    )
    run = call("explain", "opaque.py:make", "--dtype", "bf16")
    assert run.code == FINDING
    assert "captured no graph" in run.err


def bench(*arguments: str) -> tuple[list[str], dict[str, dict[str, float]]]:
    """The rows of the table, and the figures by peer."""
    run = call("bench", *arguments, "--json", "bench.json")
    assert run.code == OK, run.err
    rows = [line for line in run.out.splitlines() if line.startswith(("mixprec", "compile"))]
    return rows, {peer["peer"]: peer for peer in json.loads(Path("bench.json").read_text())["peers"]}


def test_bench_measures_three_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "COMPILER", "aot_eager")
    rows, figures = bench("model.py:make", "--dtype", "bf16", "--rounds", "2")
    assert [row.startswith(peer) for row, peer in zip(rows, figures, strict=True)] == [True] * 3
    assert "1.00 x" in next(row for row in rows if row.startswith("compile + autocast"))
    assert all(peer["first_step_s"] * 1e3 > peer["step_ms"] > 0 for peer in figures.values())
    assert 0 < figures["mixprec"]["saved_bytes"] < figures["compile fp32"]["saved_bytes"]


def test_inputs_and_parameters_are_not_saved_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "COMPILER", "aot_eager")
    Path("sum.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(64, 8), (torch.randn(32, 64),), lambda y: y.sum()\n"
    )
    _, figures = bench("sum.py:make", "--dtype", "bf16", "--rounds", "1")
    assert figures["compile fp32"]["saved_bytes"] == 0


@pytest.mark.inductor
def test_bench_goes_through_inductor() -> None:
    Path("tiny.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(64, 64).eval().requires_grad_(False), "
        "(torch.randn(64, 64),)\n"
    )
    rows, figures = bench("tiny.py:make", "--dtype", "fp16", "--rounds", "1")
    assert len(rows) == 3
    assert [peer["saved_bytes"] for peer in figures.values()] == [None] * 3  # nothing needs a gradient


def test_compare_shows_where_the_error_comes_from() -> None:
    run = call(*"compare model.py:make --dtype fp16 --json comparison.json --plot error.png".split())
    assert (run.code, run.err) == (OK, "wrote comparison.json\nwrote error.png\n")
    assert run.out.startswith("mixprec against fp64: float16, loss scale 65536")
    comparison = mpcompile.Comparison.from_json(Path("comparison.json").read_text())
    assert {error.name for error in comparison.gradients} >= {"body.weight", "head.bias"}
    assert Path("error.png").read_bytes().startswith(b"\x89PNG")
    refused = call(*"compare model.py:make --dtype bf16 --plot error.docx".split())
    assert refused.code == USAGE
    assert "docx" in refused.err


def test_compare_takes_the_loss_of_the_factory() -> None:
    Path("max.py").write_text(MODEL.replace("(torch.randn(32, 8),)", "(torch.randn(32, 8),), lambda y: y.max()"))
    found = [json.loads(call("compare", f"{file}:make", "--dtype", "bf16", "--json", "-").out) for file in FILES]
    sizes = [{g["name"]: g["size"] for g in comparison["gradients"]} for comparison in found]
    assert sizes[1]["head.bias"] == 1.0  # one output of 128 alone
    assert sizes[0]["head.bias"] != 1.0


FILES = ("model.py", "max.py")


def test_what_is_not_finite_is_a_finding() -> None:
    Path("huge.py").write_text(MODEL.replace("self.norm(self.body(x))", "self.norm(self.body(x * 1e5))"))
    run = call("compare", "huge.py:make", "--dtype", "fp16")
    assert run.code == FINDING
    assert "NOT FINITE first in mul (huge.py:" in run.out


def test_explain_narrows_to_modules_and_writes_html() -> None:
    run = call(*"explain model.py:make --dtype bf16 --module head --html head.html --json head.json".split())
    assert (run.code, run.err) == (OK, "wrote head.json\nwrote head.html\n")
    assert {node.module for node in Report.from_json(Path("head.json").read_text()).nodes} == {"head"}
    assert Path("head.html").read_text().startswith("<!doctype html>")
    assert " body" not in run.out
    refused = call(*"explain model.py:make --dtype bf16 --module hed".split())
    assert refused.code == USAGE
    assert "'hed' matches no module; the nearest names are: 'head'" in refused.err
    unwritable = call(*"explain model.py:make --dtype bf16 --html no/where.html".split())
    assert (unwritable.code, "cannot be written" in unwritable.err) == (USAGE, True)


def test_explain_shows_the_graphs_before_and_after() -> None:
    run = call(*"explain model.py:make --dtype bf16 --diff".split())
    assert run.code == OK
    assert any(line.startswith("+") and "bf16" in line for line in run.out.splitlines())


def test_tune_writes_a_policy_that_the_other_commands_take() -> None:
    run = call(*"tune model.py:make --dtype bf16 --tolerance 0.002 --batches 2 --out tuned.toml".split())
    assert (run.code, run.err) == (OK, "wrote tuned.toml\n")
    policy = mpcompile.Policy.from_toml(Path("tuned.toml"))
    assert policy.fp32
    assert run.out == Path("tuned.toml").read_text()
    assert "# tolerance 2.00e-03, objective time" in run.out
    compared = json.loads(call(*"compare model.py:make --policy tuned.toml --json -".split()).out)
    assert compared["error"] <= 0.002


def test_tune_says_where_it_cannot() -> None:
    run = call(*"tune model.py:make --dtype bf16 --tolerance 1e-12".split())
    assert run.code == FINDING
    assert "cannot meet tolerance=1e-12" in run.err
    Path("both.py").write_text(MODEL.replace("(torch.randn(32, 8),)", "((torch.randn(32, 8),), {'scale': 2.0})"))
    both = call(*"tune both.py:make --dtype bf16".split())
    assert (both.code, "returned both" in both.err) == (USAGE, True)
