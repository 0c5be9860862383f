"""The HTML page without a browser: one file, no network, nothing of the model as HTML, colours that can be read."""

import base64
import fnmatch
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import mpcompile.inspection.page
from mpcompile.inspection.page import page
from mpcompile.inspection.report import Report
from tests.report_tools import HOSTILE, hostile_report, stack_report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(mpcompile.inspection.page.__file__).parent
ROOT = Path(__file__).parent.parent


class Reader(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.raw.append(data)


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_it_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    path = stack_report().to_html(tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html"
    assert not [tag for tag, attributes in Reader(text).tags if {"src", "href"} & set(attributes)]
    assert set(re.findall(r"\w+://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in text
    assert "@import" not in text


def test_only_its_own_script_and_style_may_run() -> None:
    reader = Reader(page(stack_report()))
    (policy,) = (a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    style, _, script = reader.raw
    for kind, source in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_scripts_never_write_html(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert len(text.splitlines()) <= 300


def test_names_of_the_model_are_not_read_as_html() -> None:
    text = page(hostile_report())
    tags = [tag for tag, _ in Reader(text).tags]
    assert (tags.count("script"), tags.count("img")) == (2, 0)
    assert HOSTILE not in text
    assert HOSTILE in data_of(text)["texts"]
    assert data_of(text)["graphs"][0]["nodes"][0][0] == HOSTILE


def test_the_data_is_that_of_the_records() -> None:
    report = stack_report("fp16")
    data = data_of(page(report))
    texts, (graph,) = data["texts"], data["graphs"]
    script = (FOLDER / "model.js").read_text()
    fields = re.findall(r'"(\w+)"', script.split("VALUE_FIELDS = [")[1].split("]")[0])
    decided = re.findall(r'"(\w+)"', script.split("DECISION_FIELDS = [")[1].split("]")[0])
    nodes = {node.name: node for node in report.nodes}
    assert len(graph["nodes"]) == len(report.values)
    for row, value in zip(graph["nodes"], report.values, strict=True):
        record = dict(zip(fields, row, strict=True))
        assert (record["name"], texts[record["module"]], texts[record["dtype"]]) == (
            value.name,
            value.module,
            value.dtype,
        )
        assert [graph["nodes"][position][0] for position in record["reads"]] == list(value.reads)
        assert (record["savedBytes"], record["bytes"]) == (value.saved_bytes, value.bytes)
        assert (record["decision"] is not None) == (value.name in nodes)
        if value.name in nodes:
            decision = dict(zip(decided, record["decision"], strict=True))
            node = nodes[value.name]
            assert (texts[decision["reason"]], texts[decision["source"]]) == (node.reason, node.source)
    assert [module["path"] for module in graph["modules"]] == list(report.rollups)


def test_a_part_knows_the_rest_by_name() -> None:
    part = stack_report().within("layers.1.up")
    rows = data_of(page(part))["graphs"][0]["nodes"]
    outside = [read for row in rows for read in row[6] if isinstance(read, str)]
    assert outside
    assert not set(outside) & {value.name for value in part.values}


def test_an_empty_report_makes_a_page() -> None:
    assert data_of(page(Report("bfloat16", ())))["graphs"] == []


def test_the_wheel_has_every_file_of_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["mpcompile.inspection.page"]
    files = [path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(files) > 10
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in files)


def colours(style: str) -> list[dict[str, str]]:
    """The colours of the light and of the dark theme."""
    return [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out(theme: int) -> None:
    """WCAG 2.2 level AA: 4.5 for text, 3 for what a picture needs to be understood."""
    palette = colours((FOLDER / "page.css").read_text())[theme]
    grounds = [palette[name] for name in ("ground", "panel", "hover")]
    texts = [(palette[text], ground) for text in ("ink", "quiet", "accent") for ground in grounds]
    for kind in ("low", "fp32", "other"):
        texts += [
            (palette[f"{kind}-ink"], palette[kind]),
            (palette["quiet"], palette[kind]),
            (palette["ink"], palette[kind]),
        ]
    assert [pair for pair in texts if contrast(*pair) < 4.5] == []
    marks = ("low-line", "fp32-line", "other-line", "rounds", "saved", "accent")
    assert [name for name in marks if contrast(palette[name], palette["panel"]) < 3] == []
