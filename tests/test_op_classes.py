"""The table of operator classes: consistent with itself and with the operators of torch."""

import operator
from collections.abc import Iterator

import pytest
import torch

from mpcompile.passes import OpClass, Policy, classify, register_op, run_passes
from mpcompile.passes.op_classes import (
    _FOLLOW,
    CHOSEN_FOR_FP32,
    EXACT_OPS,
    FP32_GROUPS,
    FP32_OPS,
    LOW_OPS,
    RANKING_OPS,
    STATISTICS,
    registered_ops,
    roles_of,
)
from tests.helpers import call, dtypes, inserted_casts, operand_dtypes, text, trace

aten = torch.ops.aten
LOW, FP32, FOLLOW, EXACT, OPAQUE = OpClass
TABLES = {"LOW": LOW_OPS, "FP32": FP32_OPS, "EXACT": EXACT_OPS, "FOLLOW": _FOLLOW}

# Functions of a graph that belong to no operator namespace, or to Inductor's.
_ELSEWHERE = {"getitem", "fma", "_low_memory_max_pool_with_offsets"}


@pytest.fixture
def scan() -> Iterator[torch._ops.OpOverload]:
    """A custom operator that the table does not know."""
    with torch.library._scoped_library("mpcompile_test", "FRAGMENT") as library:
        library.define("scan(Tensor x, Tensor y) -> Tensor")
        library.impl("scan", lambda x, y: x * y, "CompositeExplicitAutograd")
        yield torch.ops.mpcompile_test.scan.default


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_an_operator(table: str) -> None:
    homes = (aten, torch.ops.prims)
    unknown = {name for name in TABLES[table] if not any(hasattr(home, name) for home in homes)}
    assert unknown - _ELSEWHERE == set()


def test_tables_are_disjoint() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert sorted(names) == sorted(set(names))


def test_reasons_of_fp32_ops_are_disjoint() -> None:
    names = [name for group in FP32_GROUPS.values() for name in group.split()]
    assert sorted(names) == sorted(set(names)) == sorted(FP32_OPS)


def test_special_lists_are_part_of_the_tables() -> None:
    assert set(LOW_OPS) >= CHOSEN_FOR_FP32
    assert set(FP32_OPS) >= STATISTICS
    assert {"argmax", "argmin", "sort", "topk", "eq", "le"} <= RANKING_OPS
    assert EXACT_OPS | {"argsort", "isclose"} >= RANKING_OPS


def _takes(overload: torch._ops.OpOverload, names: tuple[str, ...]) -> bool:
    return set(names) <= {argument.name for argument in overload._schema.arguments}


@pytest.mark.parametrize("name", LOW_OPS)
def test_roles_name_arguments_of_the_default_overload(name: str) -> None:
    roles = LOW_OPS[name]
    overload = _overloads(name)[0]
    contracted = (roles.contraction[0],) if roles.contraction else ()
    assert _takes(overload, (*roles.operands, *contracted)), overload._schema


@pytest.mark.parametrize("name", LOW_OPS)
def test_roles_name_tensors_in_every_overload_that_takes_them(name: str) -> None:
    roles = LOW_OPS[name]
    seen = 0
    for overload in _overloads(name):
        for argument in overload._schema.arguments:
            if argument.name in roles.operands:
                assert "Tensor" in str(argument.type), (overload, argument)
                seen += 1
        assert max(roles.outputs) < max(1, len(overload._schema.returns)), overload
    assert seen >= len(roles.operands)


@pytest.mark.parametrize(
    ("target", "op_class"),
    [
        (aten.mm.default, LOW),
        (aten.convolution_backward.default, LOW),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, LOW),
        (aten.sum.dim_IntList, FP32),
        (aten._softmax_backward_data.default, FP32),
        (aten.native_layer_norm.default, FP32),
        (aten.exp.default, FP32),
        (aten.index_put.default, FP32),
        (aten.embedding_dense_backward.default, FP32),
        (aten.mul.Tensor, FOLLOW),
        (aten.gelu_backward.default, FOLLOW),
        (aten.permute.default, EXACT),
        (aten.argmax.default, EXACT),
        (aten.embedding.default, EXACT),
        (torch.ops.prims.convert_element_type.default, EXACT),
        (operator.getitem, EXACT),
        (aten._scaled_mm.default, OPAQUE),
    ],
)
def test_operators_have_their_class(target: object, op_class: OpClass) -> None:
    assert classify(target) is op_class


def test_unlisted_custom_operator_is_opaque_and_left_alone(scan: torch._ops.OpOverload) -> None:
    gm = trace(lambda x, y: scan(x, y), torch.randn(2, 3), torch.randn(2, 3))
    before = text(gm)
    assert classify(scan) is OpClass.OPAQUE
    assert not any(result.changed for result in run_passes(gm, Policy()))
    assert text(gm) == before


def test_unlisted_custom_operator_reads_a_matmul_in_fp32(scan: torch._ops.OpOverload) -> None:
    gm = trace(lambda x, y: scan(x @ y, y), torch.randn(3, 3), torch.randn(3, 3))
    run_passes(gm, Policy())
    assert operand_dtypes(call(gm, "mpcompile_test::scan")) == {torch.float32}
    assert dtypes(gm)["mm"] == [torch.bfloat16]


@pytest.mark.parametrize("spelled", ["overload", "packet", "name"])
def test_registered_low_operator_reads_low(scan: torch._ops.OpOverload, spelled: str) -> None:
    spellings = {"overload": scan, "packet": scan.overloadpacket, "name": "mpcompile_test::scan"}
    register_op(spellings[spelled], "low")
    gm = trace(lambda x, y: scan(x, y), torch.randn(2, 3), torch.randn(2, 3))
    run_passes(gm, Policy())
    assert operand_dtypes(call(gm, "mpcompile_test::scan")) == {torch.bfloat16}
    assert dtypes(gm)["scan"] == [torch.bfloat16]
    assert [value.dtype for value in (node.meta["val"] for node in inserted_casts(gm))] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]
    assert roles_of(scan) is None


@pytest.mark.parametrize("op_class", ["fp32", "follow"])
def test_other_registered_operators_stay_as_traced(scan: torch._ops.OpOverload, op_class: str) -> None:
    register_op(scan, op_class)
    assert classify(scan) is OpClass(op_class)
    gm = trace(lambda x, y: scan(x, y), torch.randn(2, 3), torch.randn(2, 3))
    assert not any(result.changed for result in run_passes(gm, Policy()))


def test_registered_operators_are_listed_in_a_stable_order(scan: torch._ops.OpOverload) -> None:
    register_op("zlib::op", "low")
    register_op(scan, "fp32")
    assert registered_ops() == (("mpcompile_test::scan", "fp32"), ("zlib::op", "low"))


def test_custom_op_object_can_be_registered() -> None:
    @torch.library.custom_op("mpcompile_test::double_it", mutates_args=())
    def double_it(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    register_op(double_it, "low")
    assert classify(torch.ops.mpcompile_test.double_it.default) is OpClass.LOW


def test_an_aten_operator_can_be_registered() -> None:
    register_op(aten._scaled_mm, "follow")
    assert classify(aten._scaled_mm.default) is OpClass.FOLLOW


@pytest.mark.parametrize("op_class", ["bf16", "exact", "opaque", "LOW"])
def test_unknown_class_raises_with_the_accepted_ones(op_class: str) -> None:
    with pytest.raises(ValueError, match=r"op_class must be one of \['follow', 'fp32', 'low'\]"):
        register_op("mylib::op", op_class)


@pytest.mark.parametrize("op", ["op", torch.relu, 3, None])
def test_what_is_no_operator_raises(op: object) -> None:
    with pytest.raises(TypeError, match="register_op needs an operator or a name such as"):
        register_op(op, "low")  # type: ignore[arg-type]
