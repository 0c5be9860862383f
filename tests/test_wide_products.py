"""wide_products: which products leave in fp32 though their operands are low, and what they then return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mpcompile
from mpcompile import joint_pass
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.graph import DECOMPOSED, is_backward, op_name
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.wide_products import EMULATED, leaves_wide
from tests.helpers import UNIT_ROUNDOFF, Net, calls, joint, operand_dtypes, reasons, run_joint

BF16, FP16, ACCURATE = Policy(), Policy(dtype=torch.float16), Policy(preset="accurate")
OPTIONS = {"dtype": "bf16", "compiler": "aot_eager"}
EACH = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])


def emulated(fn: Callable[..., Any], *inputs: Tensor, policy: Policy = BF16) -> fx.GraphModule:
    """A joint graph after the passes, for a device without the low type."""
    torch._dynamo.reset()
    gm = joint(fn, *inputs)
    gm.meta[EMULATED] = True
    run_passes(gm, policy)
    return gm


def products(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in calls(gm) if classify(node.target) is OpClass.LOW]


def wide(gm: fx.GraphModule) -> list[bool]:
    """Whether each product leaves in fp32, in the order of the graph."""
    return [node.meta["val"].dtype is torch.float32 for node in products(gm)]


@EACH
def test_a_weight_gradient_is_not_rounded_between_its_product_and_the_parameter(low: torch.dtype) -> None:
    x, w = torch.randn(64, 8), torch.randn(8, 4, requires_grad=True)
    gm = emulated(lambda x, w: (x @ w).sin(), x, w, policy=Policy(dtype=low))
    assert wide(gm) == [False, True]
    g = torch.randn(64, 4)
    forward, found = run_joint(gm, [x, w.detach()], [g])
    assert forward.dtype is found.dtype is torch.float32
    assert not torch.equal(found, found.to(low).float())
    # The low operands of the gradient: x, and the tangent times the cosine of the low product.
    product = (x.to(low).float() @ w.detach().to(low).float()).to(low).float()
    left, right = x.to(low).double(), (g * product.cos()).to(low).double()
    bound = 64 * UNIT_ROUNDOFF[torch.float32] * (left.abs().t() @ right.abs())
    difference = (found.double() - left.t() @ right).abs()
    # The cosine may differ by an ulp between kernels, and then a few roundings of the operand turn out otherwise.
    assert (difference <= bound + 1e-30).double().mean() > 0.9
    assert (difference <= bound + UNIT_ROUNDOFF[low] * left.abs().t() @ right.abs()).all()


def test_where_the_low_type_is_native_on_a_cpu_they_leave_low() -> None:
    torch._dynamo.reset()
    gm = joint(lambda x, w: (x @ w).sin(), torch.randn(6, 8), torch.randn(8, 4, requires_grad=True))
    run_passes(gm, BF16)
    assert wide(gm) == [False, False]
    assert operand_dtypes(products(gm)[1]) == {torch.bfloat16}


LAYERS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (lambda x, w: F.linear(F.linear(x, w).relu(), w), (torch.randn(6, 4), torch.randn(4, 4))),
    "batched": (lambda x, w: (x @ w).sin() @ w, (torch.randn(2, 6, 4), torch.randn(2, 4, 4))),
    "convolution": (lambda x, w: F.conv2d(F.conv2d(x, w).sin(), w), (torch.randn(1, 2, 6, 6), torch.randn(2, 2, 2, 2))),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_under_accurate_every_product_leaves_wide(layer: str) -> None:
    fn, inputs = LAYERS[layer]
    gm = emulated(fn, *(v.clone().requires_grad_() for v in inputs), policy=ACCURATE)
    for node in products(gm):
        assert operand_dtypes(node) == {torch.float32}
        for value in [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else node.meta["val"]:
            assert value is None or value.dtype is torch.float32
    # What they read was rounded all the same.
    rounded = [node for node in calls(gm) if node.meta["val"] is not None and "bfloat16" in str(node.args[1:])]
    assert rounded


def test_nothing_leaves_wide_where_no_kernel_offers_it() -> None:
    gm = joint(lambda x, w: x @ w, torch.randn(6, 8), torch.randn(8, 4, requires_grad=True))
    for node in products(gm):
        assert not leaves_wide(node, "wgrad", ACCURATE, emulated=False)
        assert leaves_wide(node, "wgrad", BF16, emulated=True)
        assert not leaves_wide(node, "dgrad", BF16, emulated=True)


def cuda_joint() -> fx.GraphModule:
    """A hand-made joint graph of one linear layer, on fake tensors of a GPU."""
    graph = fx.Graph()
    with FakeTensorMode():
        x, w, g = (torch.empty(shape, device="cuda") for shape in ((8, 4), (4, 2), (8, 2)))

        def add(target: Any, *args: Any, backward: bool = False) -> fx.Node:
            node = graph.call_function(target, args)
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
            if backward:
                node.meta["partitioner_tag"] = "is_backward"
            return node

        nodes = []
        for name, value in (("primals_1", x), ("primals_2", w), ("tangents_1", g)):
            node = graph.placeholder(name)
            node.meta["val"] = value
            nodes.append(node)
        nodes[2].meta["partitioner_tag"] = "is_backward"
        aten = torch.ops.aten
        y = add(aten.mm.default, nodes[0], nodes[1])
        dx = add(aten.mm.default, nodes[2], add(aten.permute.default, nodes[1], [1, 0], backward=True), backward=True)
        dx = add(aten.sin.default, dx, backward=True)
        dw = add(aten.mm.default, add(aten.permute.default, nodes[0], [1, 0], backward=True), nodes[2], backward=True)
    output = graph.output([y, dx, dw])
    output.meta["mixprec_weight_gradients"] = (2,)
    gm = fx.GraphModule(nn.Module(), graph)
    gm.meta[DECOMPOSED] = True
    return gm


def targets(gm: fx.GraphModule) -> list[tuple[str, torch.dtype]]:
    return [(op_name(node), node.meta["val"].dtype) for node in products(gm)]


LOW_MM, WIDE_MM = ("aten.mm.default", torch.bfloat16), ("aten.mm.dtype", torch.float32)


def test_on_a_gpu_the_gemm_itself_returns_fp32() -> None:
    gm = cuda_joint()
    results = run_passes(gm, BF16)
    assert targets(gm) == [LOW_MM, LOW_MM, WIDE_MM]
    gradient = products(gm)[-1]
    assert operand_dtypes(gradient) == {torch.bfloat16}
    assert gradient.args[2] is torch.float32
    assert gm.graph.output_node().args[0][2] is gradient
    assert reasons(results).count("low operands, fp32 result straight from the GEMM") == 1


def test_on_a_gpu_under_accurate_every_gemm_does() -> None:
    gm = cuda_joint()
    run_passes(gm, ACCURATE)
    assert targets(gm) == [WIDE_MM] * 3


@pytest.mark.parametrize("preset", ["default", "accurate"])
def test_again_changes_nothing(preset: str) -> None:
    for gm in (cuda_joint(), emulated(Net(), torch.randn(5, 8), policy=Policy(preset=preset))):
        run_passes(gm, Policy(preset=preset))
        assert reasons(run_passes(gm, Policy(preset=preset))) == []


def test_an_fp16_weight_gradient_beyond_the_range_of_fp16_is_kept() -> None:
    x, w = torch.full((64, 2), 200.0), torch.randn(2, 2, requires_grad=True)
    g = torch.full((64, 2), 100.0)
    for native in (False, True):
        torch._dynamo.reset()
        gm = joint(lambda x, w: x @ w, x, w)
        if not native:
            gm.meta[EMULATED] = True
        run_passes(gm, FP16)
        _, found = run_joint(gm, [x, w.detach()], [g])
        expected = torch.full((2, 2), float("inf") if native else 64 * 200.0 * 100.0)
        assert torch.equal(found, expected)


def test_with_loss_scaling_it_leaves_its_product_wide_too() -> None:
    torch._dynamo.reset()
    gm = joint(lambda x, w: x @ w, torch.randn(64, 2), torch.randn(2, 2, requires_grad=True), scaled=True)
    gm.meta[EMULATED] = True
    run_passes(gm, FP16)
    assert wide(gm) == [False, True]


def test_reports_say_so() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend="mixprec", options=OPTIONS)
    compiled(torch.randn(5, 8)).sum().backward()
    (report,) = mpcompile.reports(compiled)
    changes = [change for graph in report.graphs for result in graph.results for change in result.changes]
    said = [change for change in changes if change.reason == "low operands, fp32 result"]
    assert [change.before for change in said] == ["bfloat16 x bfloat16 -> bfloat16"] * 2
    assert [change.after for change in said] == ["bfloat16 x bfloat16 -> float32"] * 2
    nodes = {node.name: node for graph in report.graphs for node in graph.nodes}
    for change in said:
        assert set(nodes[change.node].inputs) == {"bfloat16"}
        assert (nodes[change.node].output, nodes[change.node].precision) == ("float32", "low")


def test_a_report_under_accurate_knows_that_products_run_low() -> None:
    torch._dynamo.reset()
    options = {"policy": ACCURATE, "compiler": "aot_eager"}
    compiled = torch.compile(Net(), backend="mixprec", options=options)  # a warning that nothing runs low would raise
    compiled(torch.randn(5, 8)).sum().backward()
    (report,) = mpcompile.reports(compiled)
    low = [node for graph in report.graphs for node in graph.nodes if node.op_class == "low"]
    assert {dtype for node in low for dtype in node.inputs} >= {"bfloat16"}


@pytest.mark.parametrize("native", [False, True])
def test_gradients_of_a_compiled_model(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_pass, "has_native_bf16", lambda device: native)
    torch._dynamo.reset()
    model, x = Net(), torch.randn(64, 8)
    compiled = torch.compile(model, backend="mixprec", options=OPTIONS)
    compiled(x).square().sum().backward()
    for weight in (model.first.weight, model.last.weight):
        representable = torch.equal(weight.grad, weight.grad.bfloat16().float())
        assert representable is native
    assert any(is_backward(node) for node in mpcompile.reports(compiled)[0].modules[0][1].graph.nodes)
