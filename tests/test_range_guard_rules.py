"""fp16's range: the user's rules and regions come before the guard."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.inspection.report import NodeRecord
from tests.range_guard_tools import A, Layers, decided, in_fp16
from tests.test_programs import matmuls


def kept_in_fp32(nodes: list[NodeRecord]) -> set[tuple[str, str]]:
    """Direction and rule of what computes in fp32."""
    return {(node.direction, node.rule) for node in nodes if "float16" not in node.inputs}


@pytest.mark.parametrize("rule", ["b", "param:b.weight", "op:linear"])
def test_a_low_rule_beats_the_guard(rule: str) -> None:
    nodes = decided(70000.0, low=[rule])
    assert kept_in_fp32(nodes) == set()
    assert {node.rule for node in nodes if node.module == "b"} == {"low rule"}


def test_an_fp32_rule_beats_a_low_rule_and_comes_before_the_guard() -> None:
    nodes = decided(70000.0, low=["op:linear"], fp32=["param:b.weight"])
    assert kept_in_fp32(nodes) == {("forward", "fp32 rule"), ("backward", "fp32 rule")}
    assert {node.rule for node in nodes if node.module == "b"} == {"fp32 rule"}
    assert {node.rule for node in nodes if node.module != "b"} == {"low rule"}


def test_the_users_region_comes_before_the_guard() -> None:
    layer = Layers(70000.0)

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = layer.b(x)
        return layer.c(x)

    compiled = in_fp16(model)
    compiled(torch.randn(3, 4))
    assert kept_in_fp32(matmuls(compiled)) == {("forward", "user"), ("backward", "user")}


@pytest.mark.parametrize(("rules", "rule"), [({"low": ["op:addmm"]}, "low rule"), ({}, "range guard")])
def test_a_low_rule_beats_the_guard_of_a_constant(rules: dict[str, Any], rule: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    compiled = in_fp16(lambda x: torch.addmm(x, x, weight, alpha=1e5) @ weight, **rules)
    compiled(A)
    nodes = [node for node in matmuls(compiled) if node.rule == rule]
    assert [node.direction for node in nodes] == ["forward", "backward"]
    assert {"float16" in node.inputs for node in nodes} == {rule == "low rule"}
