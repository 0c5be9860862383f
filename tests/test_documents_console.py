"""The commands in the documentation run, and print what is shown under them."""

import re
from pathlib import Path

import pytest

from mpcompile.cli import peers
from mpcompile.cli.command import USAGE
from tests.cli_tools import call, folder_with

DOCS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = "$ python -m mpcompile "
_MEASURED = re.compile(r"-?\d+(?:\.\d+)?e[-+]\d+|-?\d+\.\d+")
"""Numbers with a point or an exponent, which another processor may round otherwise."""


def files(text: str) -> dict[str, str]:
    """The files that a document says to write, by name."""
    return dict(_FILE.findall(text))


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The arguments of each command of a document, and the lines shown under it."""
    found: list[tuple[str, list[str]]] = []
    for block in _CONSOLE.findall(text):
        for line in block.splitlines():
            if line.startswith(_PROMPT):
                found.append((line.removeprefix(_PROMPT), []))
            elif found and line.strip():
                found[-1][1].append(line)
    return found


def plain(text: str) -> str:
    return " ".join(_MEASURED.sub("#", text).split())


def missing(shown: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed, in this order: ``...`` at an end of one stands for more of it."""
    left = [plain(line) for line in printed.splitlines()]
    absent = []
    for line in shown:
        wanted = plain(line)
        found = [i for i, have in enumerate(left) if _fits(wanted, have)]
        if found:
            left = left[found[0] + 1 :]
        elif wanted != "...":
            absent.append(line)
    return absent


def _fits(wanted: str, have: str) -> bool:
    return have.startswith(wanted.removesuffix("...")) if wanted.endswith("...") else have == wanted


WITH_COMMANDS = [path for path in DOCS if commands(path.read_text())]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_run_and_print_what_is_shown(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "COMPILER", "aot_eager")  # generating code takes a minute
    text = document.read_text()
    with folder_with(files(text), tmp_path):
        monkeypatch.setenv("COLUMNS", "80")
        for arguments, shown in commands(text):
            run = call(*arguments.split())
            assert run.code != USAGE, run.err
            assert missing(shown, run.out + run.err) == [], run.out + run.err


def test_the_documents_with_commands_are_found() -> None:
    assert "command_line.md" in {path.name for path in WITH_COMMANDS}


DOCUMENT = """
<!-- file: model.py -->
```python
x = 1
```
```console
$ python -m mpcompile explain model.py:make
error 1.5e-03 in 3 places
tail...
```
"""


def test_what_is_read_of_a_document() -> None:
    assert files(DOCUMENT) == {"model.py": "x = 1\n"}
    ((arguments, shown),) = commands(DOCUMENT)
    assert arguments == "explain model.py:make"
    assert missing(shown, "first\nerror   2.5e-03 in 3 places\ntail of it") == []
    assert missing(shown, "error 2.5e-03 in 4 places\ntail of it") == [shown[0]]
    assert missing(shown, "tail\nerror 1.5e-03 in 3 places") == [shown[1]]
