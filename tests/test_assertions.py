"""``assert_precision``: what it lets pass, what it names, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile.inspection.assertions import computed_in
from mpcompile.inspection.report import NodeRecord, Report
from tests.test_programs import mixprec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.softmax(self.up(self.norm(x)), -1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def report_of(**options: object) -> Report:
    return mpcompile.explain(Net(), torch.arange(8), options={"dtype": "bf16", **options})


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(fp32=["layers.1.up"])


def test_norms_and_softmax_compute_in_fp32_and_layers_low(report: Report) -> None:
    for direction in (None, "forward", "backward"):
        mpcompile.assert_precision(report, "layers.*.norm", torch.float32, direction=direction)
        mpcompile.assert_precision(report, "op:softmax", torch.float32, direction=direction)
        mpcompile.assert_precision(report, "layers.0", torch.bfloat16, direction=direction)
        mpcompile.assert_precision(report, "layers.1.up", torch.float32, direction=direction)


def test_what_differs_is_shown_with_who_decided_it(report: Report) -> None:
    with pytest.raises(AssertionError) as raised:
        mpcompile.assert_precision(report, "layers", torch.bfloat16)
    head, titles, *rows = str(raised.value).splitlines()
    products = [node for node in report.nodes if node.module.startswith("layers") and node.op_class == "low"]
    pinned = [node for node in products if node.module == "layers.1.up"]
    assert head == f"3 of {len(products)} operations of 'layers' do not compute in bfloat16:"
    assert titles.split() == ["node", "op", "computes", "in", "decided", "by", "module", "source"]
    assert len(rows) == len(pinned) == 3
    for row, node in zip(rows, pinned, strict=True):
        assert row.split()[:4] == [node.direction[0] + "w", node.name, node.op.split(".")[1], "float32"]
        assert "fp32 rule: rule 'layers.1.up'" in row
        assert "layers.1.up" in row.split()
        assert row.split()[-1].startswith("test_assertions.py:")


def test_directions_are_told_apart() -> None:
    report = report_of(fp32=["head@forward"])
    mpcompile.assert_precision(report, "head", torch.float32, direction="forward")
    mpcompile.assert_precision(report, "head", torch.bfloat16, direction="backward")
    with pytest.raises(AssertionError, match="2 of 3 operations of 'head' do not compute in float32"):
        mpcompile.assert_precision(report, "head", torch.float32, direction="backward")  # the third sums the bias
    with pytest.raises(AssertionError, match="1 of 3 operations of 'head' do not compute in bfloat16"):
        mpcompile.assert_precision(report, "head", torch.bfloat16)


def test_an_operator_asked_for_low_counts_in_full(report: Report) -> None:
    with pytest.raises(AssertionError, match=r"8 of 8 operations of 'op:softmax' do not compute in bfloat16"):
        mpcompile.assert_precision(report, "op:softmax", torch.bfloat16, direction="forward")
    low = report_of(low=["op:softmax@forward"])
    mpcompile.assert_precision(low, "op:softmax", torch.bfloat16, direction="forward")
    mpcompile.assert_precision(low, "layers.0", torch.bfloat16)


def test_functions_of_torch_name_what_they_became(report: Report) -> None:
    mpcompile.assert_precision(report, "op:layer_norm", torch.float32)
    mpcompile.assert_precision(report, "op:embedding", torch.float32, direction="backward")
    with pytest.raises(AssertionError, match=r"3 of 15 operations of 'op:linear' do not compute in bfloat16"):
        mpcompile.assert_precision(report, "op:linear", torch.bfloat16)
    mpcompile.assert_precision(report_of(fp32=["op:linear"]), "op:linear", torch.float32)


def test_parameters_name_what_reads_them(report: Report) -> None:
    mpcompile.assert_precision(report, "param:layers.*.norm.*", torch.float32)
    mpcompile.assert_precision(report, "param:*.down.weight", torch.bfloat16)
    with pytest.raises(AssertionError) as raised:
        mpcompile.assert_precision(report, "param:layers.*.up.weight", torch.bfloat16)
    head, _, *rows = str(raised.value).splitlines()
    assert head.startswith("2 of 4 operations")  # forward and the gradient of the input; that of the weight reads none
    assert [row.split()[0] for row in rows] == ["fw", "bw"]
    with pytest.raises(ValueError, match=r"'param:hed\.\*' matches no parameter; the nearest names are: 'head\."):
        mpcompile.assert_precision(report, "param:hed.*", torch.float32)


def test_the_low_copies_of_a_weight_cache_are_the_parameter() -> None:
    compiled = mixprec(Net(), weight_cache=True)
    compiled(torch.arange(8))
    mpcompile.assert_precision(compiled, "param:head.weight", torch.bfloat16, direction="forward")


def test_a_module_without_products_is_not_low(report: Report) -> None:
    with pytest.raises(AssertionError, match=r"operations of 'layers\.0\.norm' do not compute in bfloat16"):
        mpcompile.assert_precision(report, "layers.0.norm", torch.bfloat16)


def test_a_long_table_is_cut(report: Report) -> None:
    with pytest.raises(AssertionError) as raised:
        mpcompile.assert_precision(report, "*", torch.float16)
    head, _, *rows, last = str(raised.value).splitlines()
    assert head.startswith("15 of 15 operations of '*'")
    assert (len(rows), last) == (12, "... and 3 more")


def test_fp16_is_its_own_type() -> None:
    report = report_of(dtype="fp16")
    mpcompile.assert_precision(report, "layers.*.up", torch.float16)
    with pytest.raises(AssertionError, match="6 of 6 operations"):
        mpcompile.assert_precision(report, "layers.*.up", torch.bfloat16)


def test_compiled_models_and_reports_read_back_are_taken() -> None:
    compiled = mixprec(Net())
    with pytest.raises(LookupError, match="call the compiled model once"):
        mpcompile.assert_precision(compiled, "head", torch.bfloat16)
    compiled(torch.arange(8))
    mpcompile.assert_precision(compiled, "head", torch.bfloat16)
    (report,) = mpcompile.reports(compiled)
    mpcompile.assert_precision(Report.from_json(report.to_json()), "head", torch.bfloat16)
    with pytest.raises(TypeError, match=r"what torch\.compile"):
        mpcompile.assert_precision(Net(), "head", torch.bfloat16)


def test_what_matches_nothing_is_an_error_that_names_the_nearest(report: Report) -> None:
    with pytest.raises(ValueError, match=r"'layer\.0' matches no module; the nearest names are: 'layers\.0'"):
        mpcompile.assert_precision(report, "layer.0", torch.float32)
    with pytest.raises(ValueError, match=r"'op:sofmax' matches no operator; the nearest names are: 'softmax'"):
        mpcompile.assert_precision(report, "op:sofmax", torch.float32)
    with pytest.raises(ValueError, match=r"'table' matches only operations that move, select or cast"):
        mpcompile.assert_precision(report, "table", torch.float32, direction="forward")
    with torch.no_grad():
        inference = report_of()
    with pytest.raises(ValueError, match=r"'head' matches no operation in backward, only 1 in the other"):
        mpcompile.assert_precision(inference, "head", torch.bfloat16, direction="backward")


@pytest.mark.parametrize(
    ("pattern", "dtype", "direction", "message"),
    [
        ("head", torch.float64, None, "dtype must be one of torch.float32, torch.bfloat16, torch.float16"),
        ("head", "bf16", None, "dtype must be one of"),
        ("head", torch.float32, "both", "direction must be 'forward', 'backward' or None"),
        ("head@backward", torch.float32, None, "give direction='forward' or direction='backward' instead"),
        ("ops:mm", torch.float32, None, "is not understood; write a module path"),
    ],
)
def test_bad_arguments(report: Report, pattern: str, dtype: torch.dtype, direction: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mpcompile.assert_precision(report, pattern, dtype, direction=direction)


def node(op: str, op_class: str, inputs: tuple[str, ...], output: str) -> NodeRecord:
    fields = {"user_op": op, "precision": "as traced", "rule": "class", "reason": "", "module": "", "source": ""}
    return NodeRecord(name="n", op=op, op_class=op_class, inputs=inputs, output=output, direction="forward", **fields)


@pytest.mark.parametrize(
    ("op", "op_class", "inputs", "output", "expected"),
    [
        ("aten.mm.default", "low", ("bfloat16", "bfloat16"), "float32", "bfloat16"),
        ("aten._flash.default", "low", ("float32", "float16", "float16"), "float16", "float16"),
        ("aten.addmm.default", "low", ("float32", "float32"), "float32", "float32"),
        ("aten.add.Tensor", "follow", ("bfloat16", "float32"), "float32", "float32"),
        ("aten.mul.Tensor", "follow", ("bfloat16", "int64"), "bfloat16", "bfloat16"),
        ("aten.sum.default", "fp32", ("bfloat16",), "float32", "float32"),
        ("aten.histc.default", "fp32", ("bfloat16", "float32"), "int64", "float32"),
        ("mylib.op.default", "opaque", ("bfloat16",), "float32", "bfloat16"),
        ("mylib.op.default", "opaque", ("float32",), "float16", "float16"),
        ("cond", "opaque", ("bool", "float32"), "float32", ""),
        ("aten.view.default", "exact", ("float32",), "float32", ""),
        ("aten.add.Tensor", "follow", ("int64", "int64"), "int64", ""),
        ("aten.rand.default", "opaque", (), "float32", ""),
    ],
)
def test_what_an_operation_computes_in(
    op: str, op_class: str, inputs: tuple[str, ...], output: str, expected: str
) -> None:
    assert computed_in(node(op, op_class, inputs, output)) == expected


def test_custom_operators_and_bodies_of_higher_order_ops() -> None:
    @torch.library.custom_op("assertions::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cond(x.sum() > 0, lambda y: self.layer(y), lambda y: self.layer(y) * 2, (x,))
            return twice(x)

    with torch.no_grad():
        report = mpcompile.explain(Branch(), torch.ones(4, 8), options={"dtype": "bf16"})
    assert any(node.op == "cond" for node in report.nodes)
    mpcompile.assert_precision(report, "op:assertions::twice", torch.float32)
    mpcompile.assert_precision(report, "op:addmm", torch.bfloat16)
