"""The module with a planted fault is named first, in every architecture."""

import pytest
import torch
from torch import nn

import mpcompile
from tests.analysis_tools import (
    ARCHITECTURES,
    Cancels,
    EpsilonVanishes,
    GradientOverflows,
    Overflows,
    Plain,
    build,
)

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.__name__)


def is_planted(module: str) -> bool:
    return module.split(".")[0] == "planted"


@architectures
def test_an_overflow_in_forward(architecture: type[nn.Module]) -> None:
    model, x = build(architecture, Overflows)
    found = mpcompile.find_nonfinite(model, x, options={"dtype": "fp16"})
    assert found is not None
    assert (found.direction, found.module, found.finite_in_fp32) == ("forward", "planted.down", True)
    assert found.largest_in_fp32 > 65504
    assert found.rule == "planted.down"


def test_the_rule_prevents_the_overflow_it_is_given_for() -> None:
    model, x = build(ARCHITECTURES[0], Overflows)
    found = mpcompile.find_nonfinite(model, x, options={"dtype": "fp16", "fp32": ["planted.down"]})
    assert found is None or found.module != "planted.down"


@architectures
def test_an_overflow_in_backward(architecture: type[nn.Module]) -> None:
    model, x = build(architecture, GradientOverflows)
    found = mpcompile.find_nonfinite(model, x, options={"dtype": "fp16"})
    assert found is not None
    assert (found.direction, found.module) == ("backward", "planted.inner")
    assert found.finite_at is not None
    assert found.loss_scale == 2 * found.finite_at


def test_an_overflow_in_backward_comes_first_at_a_fixed_scale() -> None:
    model, x = build(ARCHITECTURES[0], GradientOverflows)
    at_fault = mpcompile.compare(model, x, options={"dtype": "fp16", "loss_scale": 2.0**16}).worst(1)[0]
    assert at_fault.breaks
    assert is_planted(at_fault.module)


@architectures
def test_an_epsilon_that_vanishes(architecture: type[nn.Module]) -> None:
    model, x = build(architecture, EpsilonVanishes)
    comparison = mpcompile.compare(model, x, options={"dtype": "fp16"})
    assert is_planted(comparison.worst(1)[0].module)
    assert is_planted(comparison.modules()[0].module)
    first = comparison.first_nonfinite()
    assert first is not None
    assert is_planted(first.module)


@architectures
def test_a_difference_that_cancels(architecture: type[nn.Module]) -> None:
    model, x = build(architecture, Cancels)
    dtype = "fp16" if architecture is ARCHITECTURES[0] else "bf16"
    comparison = mpcompile.compare(model, x, options={"dtype": dtype})
    worst = comparison.worst(1)[0]
    assert (worst.module, worst.user_op) == ("planted", "aten.sub.Tensor")
    assert worst.amplification > 50
    assert worst.amplified > 0.5
    assert is_planted(comparison.modules()[0].module)


def test_nothing_is_found_where_there_is_no_fault() -> None:
    model, x = build(ARCHITECTURES[0], Plain)
    assert mpcompile.find_nonfinite(model, x, options={"dtype": "fp16"}) is None


def test_a_large_number_added_and_taken_away_in_fp32_is_no_fault() -> None:
    class Shifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1000) - 1000

    model, x = build(ARCHITECTURES[1], Shifts)
    found = mpcompile.compare(model, x, options={"dtype": "bf16"})
    assert all(abs(node.amplified) < 0.02 for node in found.nodes if is_planted(node.module))
