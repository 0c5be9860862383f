"""A policy as one line and as a TOML file: both round trips, the digest, and what wrong text is answered with."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpcompile.passes.policy import PRESETS, Policy
from mpcompile.passes.rules import PHASES, parse_rule

PRINTABLE = st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" \";,[]=#\\'@*?{}")
PATTERNS = st.text(PRINTABLE, min_size=1, max_size=12)


@st.composite
def rules(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(("", "op:", "param:")))
    pattern = draw(st.sampled_from(("softmax", "mm", "*mm", "[ab]mm")) if kind == "op:" else PATTERNS)
    phase = draw(st.sampled_from([name for name in PHASES if name]) | st.none())
    text = f"{kind}{pattern}" if phase is None else f"{kind}{pattern}@{phase}"
    try:
        parse_rule(text)
    except ValueError:
        assume(False)
    return text


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    preset = draw(st.sampled_from(PRESETS))
    lists = st.just(()) if preset == "torch" else st.lists(rules(), max_size=4).map(tuple)
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    try:
        return Policy(dtype=dtype, preset=preset, fp32=draw(lists), low=draw(lists))
    except ValueError:  # one rule in both lists
        assume(False)
        raise


@settings(max_examples=120, deadline=None)
@given(policies())
def test_a_policy_prints_as_one_line_that_is_read_back(policy: Policy) -> None:
    assert len(str(policy).splitlines()) == 1
    assert Policy.parse(str(policy)) == policy


@settings(max_examples=120, deadline=None)
@given(policies())
def test_a_policy_is_written_as_toml_that_is_read_back(policy: Policy) -> None:
    assert Policy.from_toml(policy.to_toml()) == policy


@settings(max_examples=50, deadline=None)
@given(policies(), policies())
def test_digests_are_equal_where_policies_are(first: Policy, second: Policy) -> None:
    assert (first.digest == second.digest) is (first == second)


RULED = Policy(
    dtype=torch.float16, preset="accurate", fp32=("layers.[01].norm", "op:softmax@dgrad", 'a "b"; c'), low=("head",)
)


def test_the_line_is_what_one_would_write() -> None:
    assert str(Policy()) == "dtype=bf16,preset=default"
    assert str(RULED) == (
        r'dtype=fp16,preset=accurate,fp32=[layers.[01].norm;op:softmax@dgrad;"a \"b\"; c"],low=[head]'
    )


def test_the_file_is_what_one_would_write() -> None:
    assert RULED.to_toml() == (
        'dtype = "fp16"\npreset = "accurate"\n'
        'fp32 = [\n    "layers.[01].norm",\n    "op:softmax@dgrad",\n    "a \\"b\\"; c",\n]\nlow = [\n    "head",\n]\n'
    )


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("preset=fast", Policy(preset="fast")),
        (" dtype = fp16 , fp32 = [ a ; op:mm ] ", Policy(dtype=torch.float16, fp32=("a", "op:mm"))),
        ("low=[a],dtype=bf16", Policy(low=("a",))),
        ("fp32=[]", Policy()),
        ('fp32=["a";b]', Policy(fp32=("a", "b"))),
    ],
)
def test_a_line_may_leave_keys_out_and_have_spaces_and_any_order(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy


BAD_LINES = [
    ("", "cannot read ''; write 'dtype=bf16,"),
    ("bf16", "cannot read 'bf16'; write 'dtype=bf16,"),
    ("dtype=bf16;preset=fast", "cannot read 'dtype=bf16;preset=fast'"),
    ("fp32=[a", r"cannot read 'fp32=\[a'"),
    ("preset=fast,fp32=[a;]", r"cannot read 'fp32=\[a;\]'"),
    ("fp32=[a b]", r"cannot read 'fp32=\[a b\]'"),
    ("fp32=[a],fp32=[b]", "'fp32' is given twice"),
    ("presets=fast", "unknown key 'presets'. Did you mean 'preset'\\? Accepted: dtype, preset, fp32, low"),
    ("zzz=1", "unknown key 'zzz'. Accepted: dtype, preset, fp32, low"),
    ("dtype=bf17", "'dtype' must be one of 'bf16', 'fp16', 'fp32'; got 'bf17'"),
    ("preset=fats", "must be one of 'default', 'accurate', 'fast', 'torch'; got 'fats'. Did you mean 'fast'\\?"),
    ("preset=[fast]", r"'preset' must be a string, got \['fast'\]"),
    ("fp32=a", "'fp32' must be a list of strings, got 'a'"),
    (r'fp32=["\x"]', r'"\\x" is not quoted as in JSON'),
    ("fp32=[layer:a]", "Rule 'layer:a' is not understood"),
    ("fp32=[op:sofmax]", "Rule 'op:sofmax' matches no operator; the nearest names are: 'softmax'"),
    ("fp32=[a],low=[a]", "Rule 'a' is in both `fp32` and `low`"),
    ("preset=torch,low=[a]", "Rule 'a' contradicts preset 'torch'"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LINES)
def test_a_line_that_is_wrong_raises_with_itself_and_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Policy.parse(text)
    assert str(caught.value).startswith(f"Policy {text!r}: ")


BAD_FILES = [
    ('dtype = "bf16"\npreset = fast\n', 2, "Invalid value"),
    ('dtype = "bf16"\ndtype = "fp16"\n', 2, "Cannot overwrite a value"),
    ('\n\npreset = "fats"\n', 3, "got 'fats'. Did you mean 'fast'"),
    ('# dtype\n  dtype = "bf17"\n', 2, "'dtype' must be one of 'bf16', 'fp16', 'fp32'; got 'bf17'"),
    ('dtype = "bf16"\nfp16 = ["a"]\n', 2, "unknown key 'fp16'. Accepted: dtype, preset, fp32, low"),
    ("\nfp32 = [1]\n", 2, r"'fp32' must be a list of strings, got \[1\]"),
    ('low = "a"\n', 1, "'low' must be a list of strings, got 'a'"),
    ("dtype = 16\n", 1, "'dtype' must be a string, got 16"),
    ('[policy]\ndtype = "bf16"\n', 0, "unknown key 'policy'"),
    ('fp32 = [\n    "a",\n    "op:sofmax",\n]\n', 3, "Rule 'op:sofmax' matches no operator"),
    (
        'fp32 = [\n    "a",\n    "b@backwards",\n]\n',
        3,
        "Rule 'b@backwards' ends with no phase: did you mean 'backward'",
    ),
    ('fp32 = ["b"]\npreset = "torch"\n', 1, "contradicts preset 'torch'"),
]


@pytest.mark.parametrize(("text", "line", "message"), BAD_FILES)
def test_a_file_that_is_wrong_raises_with_its_name_and_the_line(
    text: str, line: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Policy.from_toml(path)
    assert str(caught.value).startswith(f"Policy file {str(path)!r}")
    if line:
        assert f"line {line}" in str(caught.value)


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(RULED.to_toml())
    assert Policy.from_toml(path) == Policy.from_toml(str(path)) == RULED
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        Policy.from_toml(tmp_path / "nowhere.toml")


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes('fp32 = ["schicht.größe"]'.encode())
    assert Policy.from_toml(path).fp32 == ("schicht.größe",)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = f"from mpcompile import Policy; print(Policy.parse({str(RULED)!r}).digest)"
    environment: dict[str, Any] = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert found.stdout.strip() == RULED.digest, found.stderr
    assert len(RULED.digest) == 16
