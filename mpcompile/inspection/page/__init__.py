"""A report as one HTML file that needs no network: the data as JSON, a style sheet, and scripts that draw on demand."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from mpcompile.inspection.page.data import page_data
from mpcompile.inspection.report import Report

# In this order: each uses only names of those before it.
_SCRIPTS = [f"{name}.js" for name in "model layout elements tree items drawing overview details search main".split()]


def page(report: Report) -> str:
    """The page. Names and lines of the model reach it as JSON, and the scripts show them as text, never as HTML."""
    template = Environment(autoescape=True).from_string(_read("page.html.j2"))
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS))
    return template.render(
        title=f"mixprec report, {report.dtype}, policy {report.preset}",
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=htmlsafe_json_dumps(page_data(report), separators=(",", ":")),
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """What a browser compares a script or style with under the page's content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
