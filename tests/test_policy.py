"""The policy: a checked, frozen, hashable value."""

import dataclasses

import pytest
import torch

from mpcompile.passes import Policy
from mpcompile.passes.rules import Rule


def test_default_is_bfloat16_without_rules() -> None:
    policy = Policy()
    assert (policy.dtype, policy.fp32, policy.low, policy.is_fp32) == (torch.bfloat16, (), (), False)


def test_only_float32_leaves_everything_alone() -> None:
    assert Policy(dtype=torch.float32).is_fp32
    assert not Policy(dtype=torch.float16).is_fp32


def test_is_a_value() -> None:
    first, second = (Policy(fp32=("head",), low=("op:softmax",)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert eval(repr(first), {"Policy": Policy, "torch": torch}) == first
    assert first != Policy(fp32=("head",))
    assert first != dataclasses.replace(first, dtype=torch.float16)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().dtype = torch.float16  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, "bf16", None])
def test_other_dtypes_raise_with_the_accepted_ones(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, torch.float16 or torch.float32"):
        Policy(dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp32", "low"])
@pytest.mark.parametrize("value", ["head", ["head"], None])
def test_rules_must_be_a_tuple(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"Policy.{name} must be a tuple of rules"):
        Policy(**{name: value})  # type: ignore[arg-type]


def test_rule_in_both_lists_raises() -> None:
    with pytest.raises(ValueError, match="Rule 'head' is in both `fp32` and `low`; keep one"):
        Policy(fp32=("body", "head"), low=("head",))


@pytest.mark.parametrize("name", ["fp32", "low"])
def test_bad_rules_raise_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        Policy(**{name: ("layer:norm",)})
    with pytest.raises(ValueError, match="matches no operator"):
        Policy(**{name: ("op:sofmax",)})


def test_rules_are_parsed_per_precision() -> None:
    policy = Policy(fp32=("head", "op:softmax"), low=("param:*.bias",))
    assert policy.rules("fp32") == (Rule("module", "head"), Rule("op", "softmax"))
    assert policy.rules("low") == (Rule("param", "*.bias"),)


def test_only_op_rules_keeps_dtype_and_operator_rules() -> None:
    policy = Policy(dtype=torch.float16, fp32=("head", "op:softmax"), low=("param:*", "op:mul"))
    assert policy.only_op_rules() == Policy(dtype=torch.float16, fp32=("op:softmax",), low=("op:mul",))
