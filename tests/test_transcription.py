"""Every node of a rewritten graph is written down: what it is, what it reads, where it rounds, what backward keeps."""

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile.inspection.report import Report, ValueRecord
from mpcompile.passes.graph import CAST, output_of
from mpcompile.passes.saved_values import predict_partition, size
from tests.report_tools import Stack, stack_report
from tests.saved_bytes_tools import bytes_saved
from tests.test_programs import in_fp32, mixprec

OPTIONS = {"dtype": "bf16"}


def named(report: Report) -> dict[str, ValueRecord]:
    return {value.name: value for value in report.values}


def of_kind(report: Report, kind: str) -> list[ValueRecord]:
    return [value for value in report.values if value.kind == kind]


def test_the_values_are_the_nodes_of_the_graph_and_its_outputs() -> None:
    report = stack_report()
    ((_, after),) = report.modules
    nodes = [node for node in after.graph.nodes if node.op != "output"]
    values = report.values[: len(nodes)]
    assert [value.name for value in values] == [node.name for node in nodes]
    for value, node in zip(values, nodes, strict=True):
        assert value.reads == tuple(source.name for source in node.all_input_nodes)
        assert (value.kind == "cast") == (CAST in node.meta)
        if isinstance(node.meta.get("val"), Tensor):
            fake = node.meta["val"]
            assert (value.dtype, value.shape) == (str(fake.dtype)[6:], tuple(fake.shape))
            assert value.bytes == fake.numel() * fake.itemsize
    returned = [leaf for leaf in output_of(after).args[0] if leaf is not None]
    assert [value.reads[0] for value in report.values[len(nodes) :]] == [node.name for node in returned]


def test_edges_lead_to_values_that_come_before() -> None:
    seen: set[str] = set()
    for value in stack_report("fp16").values:
        assert seen.issuperset(value.reads), value
        seen.add(value.name)


def test_inputs_and_outputs_say_what_they_are() -> None:
    report = stack_report("fp16")
    notes = {value.note: value for value in of_kind(report, "input")}
    assert notes["parameter layers.1.up.weight"].module == "layers.1.up"
    assert notes["loss scale"].dtype == "float32"
    assert notes["gradient of an output, from outside"].direction == "backward"
    outputs = {value.note: value for value in of_kind(report, "output")}
    gradient = outputs["gradient of head.weight"]
    assert (gradient.module, gradient.direction) == ("head", "backward")
    assert (gradient.dtype, gradient.shape) == ("float32", (4, 64))
    assert outputs["overflow flags"].reads == ("gradient_flags",)
    assert outputs["output"].direction == "forward"
    assert len([note for note in outputs if note.startswith("gradient of ")]) == 20
    assert len([note for note in notes if note.startswith("parameter ")]) == 20


def test_a_cast_of_a_parameter_belongs_to_the_module_that_holds_it() -> None:
    report = stack_report()
    casts = [cast for cast in report.casts if cast.parameter]
    assert len(casts) == len({cast.parameter for cast in casts}) == 14
    for cast in casts:
        assert cast.module == cast.parameter.rpartition(".")[0]
        assert named(report)[cast.name].note == f"low form of {cast.parameter}"


def test_what_scales_the_loss_is_there_and_named() -> None:
    report = stack_report("fp16")
    added = {value.name: value for value in of_kind(report, "added")}
    assert added["unscaled_head_weight"].note == "unscaled where it ends"
    assert added["scaled_tangents_1"].note == "scaled where backward begins"
    assert added["gradient_flags"].note == "vector of overflow flags"
    # What flags an overflow stands where the gradient is, not in one heap.
    flags = [value for value in added.values() if value.op == "aten.logical_not.default" and value.module == "head"]
    assert len(flags) == 2
    assert of_kind(stack_report(), "added") == []


def test_it_rounds_where_16_bits_are_made_of_more() -> None:
    report = stack_report()
    values = named(report)
    for cast in report.casts:
        # What relu and its backward select of low values is low already.
        assert values[cast.name].rounds == (cast.after == "bfloat16" and not cast.value.startswith(("relu", "where")))
    for node in report.matmuls():
        assert values[node.name].rounds == (node.output == "bfloat16")
    assert not any(value.rounds for value in report.values if value.dtype == "float32" or value.kind == "view")


def test_a_value_that_is_exact_in_16_bits_is_not_rounded_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    with torch.no_grad():
        report = mpcompile.explain(model, torch.randn(4, 8), options=OPTIONS)
    rounds = {cast.value: named(report)[cast.name].rounds for cast in report.casts if cast.after == "bfloat16"}
    assert (rounds["relu"], rounds["sigmoid"]) == (False, True)


def test_the_storage_plan_says_what_it_keeps() -> None:
    (result,) = (result for result in stack_report().graphs[0].results if result.name == "store_low")
    notes = {value.name: value.note for value in stack_report().values}
    assert result.changed
    for change in result.changes:
        assert notes[change.node] == change.reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_backward_keeps_is_what_the_partitioner_is_predicted_to_keep(dtype: str) -> None:
    report = stack_report(dtype)
    ((before, after),) = report.modules
    for graph, total in ((after, report.saved_bytes), (before, report.saved_bytes_fp32)):
        kept = [node for node in predict_partition(graph.graph).saved if node.op == "call_function"]
        assert total == sum(map(size, kept)) > 0
    assert report.saved_bytes < 0.6 * report.saved_bytes_fp32


class Attention(nn.Module):
    """What it keeps for backward is mostly the operands of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(8, 64, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind()
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_predicted_bytes_are_those_really_kept() -> None:
    report, x = stack_report(), torch.randn(256, 64)
    assert report.saved_bytes == pytest.approx(bytes_saved(mixprec(Stack()), [x]), rel=0.02)
    assert report.saved_bytes_fp32 == pytest.approx(bytes_saved(in_fp32(Stack()), [x]), rel=0.02)


def test_attention_counts_in_fp32_though_it_is_cast_before_autograd() -> None:
    model, x = Attention(), torch.randn(8, 64, 32)
    report = mpcompile.explain(model, x, options=OPTIONS)
    assert report.saved_bytes_fp32 == pytest.approx(bytes_saved(in_fp32(model), [x]), rel=0.02)


def test_dynamic_sizes_are_names_and_their_bytes_unknown() -> None:
    compiled = mixprec(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), dynamic=True)
    compiled(torch.randn(5, 8)).sum().backward()
    (report,) = mpcompile.reports(compiled)
    (product,) = (value for value in report.values if value.name == "addmm")
    assert isinstance(product.shape[0], str)
    assert product.shape[1] == 8
    assert product.bytes is None
    assert report.saved_bytes is None
    assert "kept for backward" not in report.summary()


def test_inference_keeps_nothing() -> None:
    with torch.no_grad():
        report = mpcompile.explain(nn.Linear(8, 8), torch.randn(4, 8), options=OPTIONS)
    assert report.saved_bytes == report.saved_bytes_fp32 == 0
