"""The policy: a checked, frozen, hashable value."""

import copy
import dataclasses
import pickle

import pytest
import torch

from mpcompile.passes import Policy
from mpcompile.passes.rules import Rule


def test_default_is_bfloat16_without_rules() -> None:
    policy = Policy()
    assert (policy.dtype, policy.fp32, policy.low, policy.is_fp32) == (torch.bfloat16, (), (), False)
    assert policy.preset == "default"


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


@pytest.mark.parametrize("preset", ["default", "accurate", "fast", "torch"])
def test_presets_are_accepted_and_tell_policies_apart(preset: str) -> None:
    assert Policy(preset=preset).preset == preset
    assert (Policy(preset=preset) == Policy()) is (preset == "default")


@pytest.mark.parametrize("preset", ["acurate", "fp32", "", None, 3])
def test_other_presets_raise_with_the_accepted_ones(preset: object) -> None:
    with pytest.raises(ValueError, match="must be one of 'default', 'accurate', 'fast', 'torch'; got") as caught:
        Policy(preset=preset)  # type: ignore[arg-type]
    assert ("Did you mean 'accurate'?" in str(caught.value)) is (preset == "acurate")


def test_rules_that_differ_in_their_phase_alone_contradict_where_both_cover_one() -> None:
    with pytest.raises(ValueError, match="'head@backward' in `fp32` and 'head@wgrad' in `low` are both for wgrad"):
        Policy(fp32=("head@backward",), low=("head@wgrad",))
    assert Policy(fp32=("head@dgrad",), low=("head@wgrad",)).rules("low") == (Rule("module", "head", "wgrad"),)


@pytest.mark.parametrize("name", ["fp32", "low"])
def test_the_torch_preset_refuses_rules(name: str) -> None:
    with pytest.raises(ValueError, match=r"contradicts preset 'torch'.*torch\.autocast\(device, enabled=False\)"):
        Policy(preset="torch", **{name: ("op:mm",)})  # type: ignore[arg-type]


def test_is_copied_and_pickled_as_a_value() -> None:
    policy = Policy(dtype=torch.float16, preset="fast", fp32=("head@dgrad",))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


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
    policy = Policy(dtype=torch.float16, preset="fast", fp32=("head", "op:softmax@dgrad"), low=("param:*", "op:mul"))
    kept = Policy(dtype=torch.float16, preset="fast", fp32=("op:softmax@dgrad",), low=("op:mul",))
    assert policy.only_op_rules() == kept
