"""Every Python block of the documentation runs, and every ``make`` command in it exists."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README, *DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?P<continued><!-- continue -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[bool, int, str]]:
    """Of every Python block: whether it continues the one before, the line it starts on, its code."""
    return [
        (match["continued"] is not None, text.count("\n", 0, match.start("code")), match["code"])
        for match in _BLOCK.finditer(text)
    ]


def run(text: str, name: str) -> int:
    """Run the blocks of a document; a fresh namespace for each that does not continue another."""
    namespace: dict[str, Any] = {}
    count = 0
    for continued, line, code in blocks(text):
        if not continued:
            namespace = {"__name__": "document"}
        # Empty lines before it, so that a traceback names the line of the document.
        exec(compile("\n" * line + code, name, "exec"), namespace)
        count += 1
    return count


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def make_commands(text: str) -> list[str]:
    lines = [line for block in _CONSOLE.findall(text) for line in block.splitlines()]
    return [line.split()[1] for line in lines if line.startswith("make ")]


@pytest.mark.inductor
def test_the_readme_runs() -> None:
    assert run(README.read_text(), str(README)) >= 3


# torch.export trips over a deprecation of its own.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_the_documents_run(document: Path) -> None:
    assert run(document.read_text(), str(document)) >= 1


@pytest.mark.parametrize("document", [README, *DOCS], ids=lambda path: path.name)
def test_make_commands_exist(document: Path) -> None:
    assert set(make_commands(document.read_text())) <= make_targets((ROOT / "Makefile").read_text())


def test_the_readme_says_how_to_start() -> None:
    assert {"demo", "test"} <= set(make_commands(README.read_text()))


def test_links_lead_to_files() -> None:
    for document in (README, *DOCS):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


DOCUMENT = """
```python
x = 1
```
<!-- continue -->
```python
y = x + 1
```
"""


def test_a_failing_block_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "document")


def test_a_block_sees_another_only_where_it_says_so() -> None:
    assert run(DOCUMENT, "document") == 2
    with pytest.raises(NameError, match="'x'"):
        run(DOCUMENT.replace("<!-- continue -->", ""), "document")


def test_a_missing_target_is_seen() -> None:
    assert make_commands("```console\nmake nothing  # words\n$ ls\n```\n") == ["nothing"]
    assert make_targets("demo: .venv/.ready ## text\n\tmake x\n.PHONY: all\n") == {"demo"}
