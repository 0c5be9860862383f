"""Rules: their grammar, what they match, and the errors for those that can match nothing."""

import pytest

from mpcompile.passes.rules import Rule, op_names, parse_rule, require_consistent, require_known_op, require_match


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("layers.*.norm", "module", "layers.*.norm"),
        ("op:softmax", "op", "softmax"),
        ("op:mylib::scan", "op", "mylib::scan"),
        ("param:*.bias", "param", "*.bias"),
        ("param: head.weight ", "param", "head.weight"),
    ],
)
def test_rules_parse(text: str, kind: str, pattern: str) -> None:
    assert parse_rule(text) == Rule(kind, pattern)


@pytest.mark.parametrize("text", ["layers.*.norm", "op:softmax", "param:*.bias"])
def test_rules_print_as_they_are_written(text: str) -> None:
    assert str(parse_rule(text)) == text


@pytest.mark.parametrize(
    ("text", "rule", "roles"),
    [
        ("layers.0", Rule("module", "layers.0"), {"forward", "dgrad", "wgrad"}),
        ("layers.0@forward", Rule("module", "layers.0", "forward"), {"forward"}),
        ("op:mm@wgrad", Rule("op", "mm", "wgrad"), {"wgrad"}),
        ("param:head.weight@dgrad", Rule("param", "head.weight", "dgrad"), {"dgrad"}),
        ("layers.*@backward", Rule("module", "layers.*", "backward"), {"dgrad", "wgrad"}),
        ("a @ dgrad ", Rule("module", "a", "dgrad"), {"dgrad"}),
        ("a@b@dgrad", Rule("module", "a@b", "dgrad"), {"dgrad"}),
    ],
)
def test_a_phase_says_what_a_rule_covers(text: str, rule: Rule, roles: set[str]) -> None:
    assert parse_rule(text) == parse_rule(str(rule)) == rule
    assert {role for role in ("forward", "dgrad", "wgrad") if rule.covers({role})} == roles
    assert rule.covers({"forward", "dgrad", "wgrad"})


@pytest.mark.parametrize(
    ("phase", "hint"), [("dgrd", "did you mean 'dgrad'"), ("backwards", "did you mean 'backward'"), ("", "After '@'")]
)
def test_a_phase_that_is_none_raises_with_those_there_are(phase: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint) as caught:
        parse_rule(f"layers.0@{phase}")
    assert f"Rule 'layers.0@{phase}' ends with no phase" in str(caught.value)
    assert "forward, dgrad, wgrad, backward" in str(caught.value)


CONTRADICTIONS = [
    ("a", "a", "is in both `fp32` and `low`; keep one"),
    ("a@dgrad", "a@dgrad", "is in both `fp32` and `low`; keep one"),
    ("a", "a@dgrad", "'a' in `fp32` and 'a@dgrad' in `low` are both for dgrad"),
    ("a@wgrad", "a", "'a@wgrad' in `fp32` and 'a' in `low` are both for wgrad"),
    ("op:mm@backward", "op:mm@wgrad", "'op:mm@backward' in `fp32` and 'op:mm@wgrad' in `low` are both for wgrad"),
    ("a@backward", "a", "are both for dgrad and wgrad"),
]


@pytest.mark.parametrize(("fp32", "low", "message"), CONTRADICTIONS)
def test_rules_for_the_same_in_the_same_phase_contradict(fp32: str, low: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_consistent([parse_rule("b"), parse_rule(fp32)], [parse_rule(low)])


@pytest.mark.parametrize(
    ("fp32", "low"),
    [("a@dgrad", "a@wgrad"), ("a@forward", "a@backward"), ("a", "param:a"), ("a.*", "a.b"), ("op:mm", "op:bmm")],
)
def test_rules_for_different_phases_or_names_do_not_contradict(fp32: str, low: str) -> None:
    assert require_consistent([parse_rule(fp32)], [parse_rule(low)]) is None


@pytest.mark.parametrize("text", ["", "  ", "op:", "param:  ", "layer:norm", ":norm", "@dgrad", "op:@dgrad", "a\nb"])
def test_rules_that_are_none_raise_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not understood; write a module path such as 'layers"):
        parse_rule(text)


@pytest.mark.parametrize("value", [3, None, ("norm",)])
def test_rules_must_be_strings(value: object) -> None:
    with pytest.raises(TypeError, match="A rule must be a string, got"):
        parse_rule(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("layers.*.norm", "layers.0.norm", True),
        ("layers.*.norm", "layers.0.norm.inner", True),
        ("layers.*.norm", "layers.0.normal", False),
        ("layers.*.norm", "layers.0", False),
        ("layers", "layers.0.attention.query", True),
        ("layer", "layers.0", False),
        ("*", "anything.at.all", True),
        ("*", "", False),
        ("head", "body.head", False),
        ("layers.[01]", "layers.1.mlp", True),
        ("layers.[01]", "layers.2.mlp", False),
    ],
)
def test_module_rules_cover_what_is_inside_the_module(pattern: str, path: str, covered: bool) -> None:
    assert parse_rule(pattern).matches(path) is covered


@pytest.mark.parametrize(
    ("rule", "name", "covered"),
    [
        ("param:*.bias", "layers.0.bias", True),
        ("param:*.bias", "bias", False),
        ("param:layers.0", "layers.0.bias", False),
        ("op:mm", "mm", True),
        ("op:mm", "bmm", False),
        ("op:*mm", "bmm", True),
        ("op:MM", "mm", False),
    ],
)
def test_other_rules_match_the_whole_name(rule: str, name: str, covered: bool) -> None:
    assert parse_rule(rule).matches(name) is covered


@pytest.mark.parametrize(
    ("packet", "found_as"),
    [
        ("_softmax", "softmax"),
        ("_softmax_backward_data", "softmax"),
        ("native_layer_norm", "layer_norm"),
        ("native_layer_norm_backward", "layer_norm"),
        ("convolution_backward", "convolution"),
        ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("mylib::scan", "mylib::scan"),
        ("mylib::scan", "scan"),
        ("mm", "mm"),
    ],
)
def test_operators_are_found_by_their_names_in_user_code(packet: str, found_as: str) -> None:
    assert found_as in op_names(packet)


def test_operators_are_not_found_by_another_name() -> None:
    assert op_names("mm") == {"mm"}
    assert "softmax" not in op_names("_log_softmax")


@pytest.mark.parametrize("name", ["softmax", "mm", "conv2d", "layer_norm", "flash*", "mylib_?", "aten::mm"])
def test_known_operators_and_globs_pass(name: str) -> None:
    assert require_known_op(Rule("op", name)) is None


def test_unknown_operator_raises_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"Rule 'op:sofmax' matches no operator.*'softmax'"):
        require_known_op(Rule("op", "sofmax"))


def test_unknown_custom_operator_raises() -> None:
    with pytest.raises(ValueError, match=r"Rule 'op:nowhere::op' matches no operator"):
        require_known_op(Rule("op", "nowhere::op"))


@pytest.mark.parametrize(
    ("rule", "noun", "near"),
    [("layers.0.nrom", "module", "layers.0.norm"), ("param:haed.weight", "parameter", "head.weight")],
)
def test_rule_without_a_match_raises_with_the_nearest_names(rule: str, noun: str, near: str) -> None:
    names = ["layers.0.norm", "head.weight", ""]
    with pytest.raises(ValueError, match=f"Rule '{rule}' matches no {noun}.*'{near}'"):
        require_match(parse_rule(rule), names)


def test_rule_without_a_match_says_so_where_there_are_no_names() -> None:
    with pytest.raises(ValueError, match="the nearest names are: none there are"):
        require_match(parse_rule("norm"), [""])


def test_rule_with_a_match_passes() -> None:
    assert require_match(parse_rule("layers.*"), ["head", "layers.0.norm"]) is None
