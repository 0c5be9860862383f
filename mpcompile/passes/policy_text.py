"""A policy as text: one line, and a TOML file. Knows keys and types; what the values mean is ``policy``'s.

Strings in rules are printable (``rules`` sees to it), and of a printable string JSON's quoting is TOML's as well.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Fields = dict[str, str | tuple[str, ...]]

_LISTS = {"dtype": False, "preset": False, "fp32": True, "low": True}
"""The keys, and whether their value is a list of strings rather than a string."""

_BARE = r'(?:[^\[\];,"\s]|\[[^\[\];,"\s]*\])+'
"""A rule that needs no quotes: a bracket in it belongs to a pattern such as ``layers.[01]``, and is closed in it."""
_ITEM = rf'(?:"(?:[^"\\]|\\.)*"|{_BARE})'
_FIELD = re.compile(rf"\s*(\w+)\s*=\s*(?:\[\s*((?:{_ITEM}\s*(?:;\s*{_ITEM}\s*)*)?)\]|([^,;\[\]\"\s]*))\s*(?:,|$)")


def write_line(fields: Mapping[str, str | tuple[str, ...]]) -> str:
    """``dtype=bf16,preset=default,fp32=[layers.*.norm;op:softmax@dgrad]``; lists without entries are left out."""
    return ",".join(f"{key}={_line(value)}" for key, value in fields.items() if value)


def read_line(text: str, where: str) -> Fields:
    """Read what ``write_line`` wrote; raises ``ValueError`` that begins with ``where``."""
    given: dict[str, Any] = {}
    position = 0
    while position < len(text) or not given:
        match = _FIELD.match(text, position)
        if match is None or match[1] in given:
            rest = text[position:]
            problem = f"{match[1]!r} is given twice" if match else f"cannot read {rest!r}"
            raise ValueError(f"{where}: {problem}; write 'dtype=bf16,preset=default,fp32=[rule;rule],low=[rule]'.")
        is_list = match[3] is None
        given[match[1]] = [_read_item(item, where) for item in re.findall(_ITEM, match[2])] if is_list else match[3]
        position = match.end()
    return _checked(given, "", where)


def write_toml(fields: Mapping[str, str | tuple[str, ...]], notes: Sequence[str] = ()) -> str:
    """A TOML document with one rule on each line; ``notes`` are comments above it."""
    comments = "".join(f"# {line}".rstrip() + "\n" for note in notes for line in note.splitlines())
    return comments + "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items() if value)


def read_toml(text: str, where: str) -> Fields:
    """Read a TOML document; raises ``ValueError`` that begins with ``where`` and names the line."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    return _checked(given, text, where)


def path_of(source: str | Path) -> Path | None:
    """The file that is meant by a ``Path`` or a string that ends in ``.toml``; None for the text of one."""
    if isinstance(source, Path) or (source.endswith(".toml") and "\n" not in source):
        return Path(source)
    return None


def line_of(text: str, what: str) -> str:
    """``", line 3"``: where a key is set or a string stands in a TOML document, or ``""``."""
    sought = re.compile(rf"^\s*{re.escape(what)}\s*=|{re.escape(json.dumps(what, ensure_ascii=False))}")
    return next((f", line {n}" for n, line in enumerate(text.splitlines(), 1) if sought.search(line)), "")


def _checked(given: Mapping[str, Any], text: str, where: str) -> Fields:
    fields: Fields = {}
    for key, value in given.items():
        at = where + line_of(text, key)
        if key not in _LISTS:
            near = difflib.get_close_matches(key, _LISTS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{at}: unknown key {key!r}.{hint} Accepted: {', '.join(_LISTS)}.")
        if not _LISTS[key] and isinstance(value, str):
            fields[key] = value
        elif _LISTS[key] and isinstance(value, list) and all(isinstance(item, str) for item in value):
            fields[key] = tuple(value)
        else:
            wanted = "a list of strings" if _LISTS[key] else "a string"
            raise ValueError(f"{at}: {key!r} must be {wanted}, got {value!r}.")
    return fields


def _line(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else f"[{';'.join(map(_item, value))}]"


def _item(rule: str) -> str:
    return rule if re.fullmatch(_BARE, rule) else json.dumps(rule, ensure_ascii=False)


def _read_item(item: str, where: str) -> str:
    if not item.startswith('"'):
        return item
    try:
        return str(json.loads(item))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {item} is not quoted as in JSON: {error.msg}.") from error


def _toml(value: str | tuple[str, ...]) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return "[\n" + "".join(f"    {json.dumps(rule, ensure_ascii=False)},\n" for rule in value) + "]"
