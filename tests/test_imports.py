"""Who may import whom: the passes stand alone, the runtime knows no graphs, private torch is in few files."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpcompile

PACKAGE = Path(mpcompile.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PRIVATE = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx._lazy_graph_module")
MAY_TOUCH_PRIVATE = {"compiler.py", "joint_pass.py", "look.py", "torch_compat.py"}
MAY_TOUCH_PRIVATE |= {"inspection/snapshot.py", "inspection/store.py"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a file reads: ``torch._dynamo.config`` needs no import of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offences(path: Path, *forbidden: str, allowed: str = "") -> list[str]:
    found = imports(ast.parse(path.read_text()))
    return [
        module
        for module in found
        if any(within(module, package) for package in forbidden) and not (allowed and within(module, allowed))
    ]


def test_the_files_are_found() -> None:
    names = {name_of(path) for path in FILES}
    assert names >= MAY_TOUCH_PRIVATE
    assert names >= {"passes/casts.py", "execution/fp32_matmul.py"}


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("passes/")], ids=name_of)
def test_passes_stand_alone(path: Path) -> None:
    assert offences(path, "mpcompile", *PRIVATE, allowed="mpcompile.passes") == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("execution/")], ids=name_of)
def test_execution_knows_no_graphs(path: Path) -> None:
    own = ("mpcompile.execution", "mpcompile.notices")
    found = offences(path, "mpcompile", "torch.fx", *PRIVATE)
    assert [name for name in found if not any(within(name, allowed) for allowed in own)] == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("inspection/")], ids=name_of)
def test_inspection_does_not_import_the_backend(path: Path) -> None:
    assert offences(path, "mpcompile.backend", "mpcompile.compiler") == []


@pytest.mark.parametrize("path", [p for p in FILES if not name_of(p).startswith(("cli/", "__main__"))], ids=name_of)
def test_nothing_needs_the_command_line(path: Path) -> None:
    assert offences(path, "mpcompile.cli", "mpcompile.__main__") == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("inspection/")], ids=name_of)
def test_inspection_does_not_import_the_analysis(path: Path) -> None:
    assert offences(path, "mpcompile.analysis", "mpcompile.tuning") == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("analysis/")], ids=name_of)
def test_the_analysis_does_not_import_the_tuning(path: Path) -> None:
    assert offences(path, "mpcompile.tuning", "mpcompile.cli") == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p) not in MAY_TOUCH_PRIVATE], ids=name_of)
def test_private_torch_is_left_to_few_files(path: Path) -> None:
    tree = ast.parse(path.read_text())
    touched = [name for name in (*imports(tree), *attributes(tree)) if any(within(name, p) for p in PRIVATE)]
    assert touched == []


def test_these_checks_see_an_offence(tmp_path: Path) -> None:
    path = tmp_path / "offender.py"
    path.write_text("def f():\n    from mpcompile import backend\n    import torch._inductor.config\n")
    assert offences(path, "mpcompile", *PRIVATE, allowed="mpcompile.passes") == [
        "mpcompile",
        "mpcompile.backend",
        "torch._inductor.config",
    ]
    tree = ast.parse("torch._dynamo.config.allow_rnn = True")
    assert "torch._dynamo.config" in set(attributes(tree))


LIGHT = """
import sys
import mpcompile
import mpcompile.cli.main
loaded = [name for name in ("torch._inductor", "torch._dynamo", "torch") if name in sys.modules]
assert not loaded, loaded
mpcompile.Policy
assert "torch._inductor" not in sys.modules
"""


def test_importing_mpcompile_and_its_command_line_does_not_load_the_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_found() -> None:
    for name in mpcompile.__all__:
        assert getattr(mpcompile, name).__doc__ or name == "__version__", name
    with pytest.raises(AttributeError, match="has no attribute 'policy_of'"):
        mpcompile.policy_of  # noqa: B018
