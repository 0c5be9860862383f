"""The preset ``"torch"``: every operation computes in the dtypes that torch.autocast gives it."""

import ast
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mpcompile
from mpcompile.notices import MixprecWarning
from mpcompile.options import Options
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.graph import dtype_of, is_backward, is_cast, output_of
from tests.helpers import Net, calls, joint, operand_dtypes, relative_error
from tests.test_programs import mixprec

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@functools.cache
def autocast_lists() -> Any:
    """torch's own lists of what autocast does on a CPU; their module cannot be imported without torch's test tools."""
    (folder,) = importlib.util.find_spec("torch.testing").submodule_search_locations
    path = Path(folder) / "_internal" / "autocast_test_lists.py"
    (lists,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "AutocastCPUTestLists"
    )
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([lists], []), str(path), "exec"), namespace)
    return namespace["AutocastCPUTestLists"]("cpu")


def cases(group: str, low: torch.dtype) -> dict[str, Case]:
    """The calls of one of torch's lists, for a low type."""
    home = {"nn": torch._C._nn, "torch": torch, "methods": torch.Tensor}[group.split("_")[0]]
    promotes = "promote" in group
    found: dict[str, Case] = {}
    for name, args, *rest in getattr(autocast_lists(), group):
        if promotes and low is torch.float16:
            args = rest[0]  # these lists have arguments for each type
        kwargs = {} if promotes or not rest else rest[0]
        found[name] = (getattr(home, name), args, kwargs)
    return found


def plain_dtypes(case: Case) -> list[torch.dtype]:
    """The dtypes of a call without autocast; on fake tensors, as some have no 16-bit kernel."""
    call, args, kwargs = case
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
        return [value.dtype for value in torch.utils._pytree.tree_leaves(call(*fakes, **kwargs))]


def autocast_dtypes(case: Case, low: torch.dtype) -> list[torch.dtype]:
    call, args, kwargs = case
    with torch.autocast("cpu", dtype=low):
        return [value.dtype for value in torch.utils._pytree.tree_leaves(call(*args, **kwargs))]


GROUPS = {
    "torch_expect_builtin_promote": 9,
    "methods_expect_builtin_promote": 9,
    "torch_16": 16,
    "torch_fp32": 6,
    "nn_16": 1,
    "nn_fp32": 12,
    "torch_need_autocast_promote": 2,
}


def test_these_are_all_the_lists_there_are() -> None:
    assert vars(autocast_lists()).keys() == GROUPS.keys()
    assert {group: len(cases(group, torch.bfloat16)) for group in GROUPS} == GROUPS


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("group", GROUPS)
def test_operations_compute_in_the_dtypes_of_autocast(group: str, dtype: str) -> None:
    low = LOW[dtype]
    chosen = list(cases(group, low).values())

    def run(*operands: Any) -> list[Any]:
        return [call(*args, **kwargs) for (call, _, kwargs), args in zip(chosen, operands, strict=True)]

    compiled = torch.compile(
        run, backend="mixprec", options={"dtype": dtype, "policy": "torch", "compiler": "aot_eager"}
    )
    results = torch.utils._pytree.tree_leaves(compiled(*(args for _, args, _ in chosen)))
    (report,) = mpcompile.reports(compiled)
    ((_, after),) = report.modules
    outputs = output_of(after).args[0]
    plain = [kind for case in chosen for kind in plain_dtypes(case)]
    expected = [kind for case in chosen for kind in autocast_dtypes(case, low)]
    assert [value.dtype for value in results] == plain  # what the uncompiled model makes
    assert len(expected) == len(plain) == len(outputs)
    for value, made, wanted in zip(outputs, plain, expected, strict=True):
        assert dtype_of(value) is made
        if made is not wanted:  # computed so, and cast where it leaves
            assert is_cast(value), value.format_node()
            value = value.args[0]
        assert dtype_of(value) is wanted, value.format_node()
    if group.endswith("_16"):
        assert {kind for node in report.matmuls() for kind in node.inputs} == {str(low)[6:]}


class Model(nn.Module):
    """Matmuls, a normalisation, attention, a loss, and a region without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 4)
        self.island = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).to(self.norm.weight.dtype).chunk(3, -1)  # widened, and narrowed again by autocast
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]).squeeze(1)
        out = self.last(self.norm(mixed + x))
        with torch.autocast("cpu", enabled=False):
            out = self.island(out.to(self.island.weight.dtype))
        return out.softmax(-1)


X = torch.randn(3, 5, 8)


def graphs(model: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[mpcompile.Report, fx.GraphModule]:
    report = mpcompile.explain(model, *inputs, options={"dtype": "bf16", "policy": "torch", **options})
    ((_, after),) = report.modules
    return report, after


@pytest.mark.parametrize("dtype", LOW)
def test_a_model_is_what_aot_autograd_makes_of_it_under_autocast(dtype: str) -> None:
    """The operators and dtypes of the graph, casts too, are those of autocast around AOTAutograd."""
    model = Model()
    _, found = graphs(model, X, dtype=dtype, loss_scale=None)
    with torch.autocast("cpu", dtype=LOW[dtype]), torch._functorch.config.patch(backward_pass_autocast="off"):
        truth = joint(model, X)
    ours = [(node.target, operand_dtypes(node), dtype_of(node)) for node in calls(found)]
    theirs = [(node.target, operand_dtypes(node), dtype_of(node)) for node in calls(truth)]
    assert ours == theirs
    assert any(is_backward(node) and LOW[dtype] in operand_dtypes(node) for node in calls(found, "mm"))


def test_a_region_without_autocast_stays_in_fp32_forward_and_backward() -> None:
    report, _ = graphs(Model(), X)
    kept = {(node.module, node.direction) for node in report.matmuls() if set(node.inputs) == {"float32"}}
    assert kept == {("island", "forward"), ("island", "backward")}


@pytest.mark.parametrize("dtype", LOW)
def test_outputs_and_gradients_keep_their_dtypes_and_are_right(dtype: str) -> None:
    model, x = Model(), X.clone().requires_grad_()
    out = mixprec(model, dtype=dtype, policy="torch")(x)
    out.square().sum().backward()
    found = [out, x.grad, *(p.grad for p in model.parameters())]
    assert {value.dtype for value in found} == {torch.float32}

    exact, wide = Model().double(), X.double().requires_grad_()
    exact.load_state_dict(model.state_dict())
    result = exact(wide)
    result.square().sum().backward()
    for value, truth in zip(found, [result, wide.grad, *(p.grad for p in exact.parameters())], strict=True):
        # Some ten roundings on the way, each of one unit roundoff of the values, and cancellation in the softmax.
        assert relative_error(value, truth) < 64 * torch.finfo(LOW[dtype]).eps / 2


def test_an_output_that_autocast_widens_keeps_its_16_bit_dtype() -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    out = mixprec(lambda v: F.mse_loss(v, v * 2), dtype="bf16", policy="torch")(x)
    assert out.dtype is torch.bfloat16


def test_an_input_that_is_returned_is_returned() -> None:
    out, same = mixprec(lambda v, w: (v @ w, w), dtype="bf16", policy="torch")(X[0], torch.ones(8, 8))
    assert (out.dtype, same.dtype) == (torch.float32, torch.float32)


def test_fp16_is_scaled() -> None:
    model = Net()
    compiled = mixprec(model, dtype="fp16", policy="torch", loss_scale=1024)
    compiled(torch.randn(5, 8)).mean().backward()
    assert mpcompile.runtime(compiled).scale == 1024
    (report,) = mpcompile.reports(compiled)
    assert [result.name for result in report.graphs[0].results if result.changed] == ["insert_loss_scaling"]


def test_fp16_gradients_are_those_of_the_unscaled_graph_bitwise() -> None:
    gradients = []
    for loss_scale in (1024, None):
        torch.manual_seed(0)
        model = Net()
        mixprec(model, dtype="fp16", policy="torch", loss_scale=loss_scale)(torch.ones(5, 8)).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_the_report_says_who_decided() -> None:
    report, _ = graphs(Net(), torch.randn(5, 8))
    assert report.preset == "torch"
    assert {node.rule for node in report.nodes} == {"policy"}
    assert {node.reason for node in report.nodes} == {"torch.autocast decided when the graph was traced"}
    assert report.summary().splitlines()[0].endswith("low type bfloat16, policy torch")
    assert mpcompile.Report.from_json(report.to_json()).preset == "torch"


class Differs(nn.Module):
    """A router that asks for fp32, and a codebook that is only ranked."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.codes = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x.float(), self.router.weight.float()), self.codes(x).argmin(-1)


def test_where_the_default_policy_differs_autocast_is_followed() -> None:
    found = {}
    for policy in ("default", "torch"):
        report, _ = graphs(Differs(), torch.randn(5, 8), policy=policy)
        found[policy] = [set(node.inputs) for node in report.matmuls() if node.direction == "forward"]
    assert found == {"default": [{"float32"}] * 2, "torch": [{"bfloat16"}] * 2}


def test_no_decision_and_no_cast_of_ours_is_in_the_graph() -> None:
    report, _ = graphs(Model(), X)
    assert report.casts == ()
    assert [result.name for result in report.graphs[0].results if result.changed] == []


def test_an_ambient_autocast_of_another_dtype_does_not_decide() -> None:
    compiled = mixprec(Net(), dtype="bf16", policy="torch")
    with torch.autocast("cpu", dtype=torch.float16), pytest.warns(MixprecWarning, match="autocast is active"):
        compiled(torch.randn(5, 8))
    (report,) = mpcompile.reports(compiled)
    assert {kind for node in report.matmuls() for kind in node.inputs} == {"bfloat16"}


def test_a_bare_graph_is_refused_with_the_way_out() -> None:
    gm = joint(Net(), torch.randn(5, 8))
    before = str(gm.graph)
    with pytest.raises(ValueError, match=r"this graph was traced before. Use torch.compile\(.*'policy': 'torch'"):
        run_passes(gm, Policy(preset="torch"))
    assert str(gm.graph) == before


@pytest.mark.parametrize("name", ["fp32", "low"])
def test_rules_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Rule 'first' contradicts preset 'torch', where torch\.autocast decides"):
        Options.parse({"policy": "torch", name: ["first"]})


@pytest.mark.inductor
def test_through_inductor() -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8)
    torch.compile(model, backend="mixprec", options={"dtype": "bf16", "policy": "torch"})(x).square().sum().backward()
    exact = nn.Linear(8, 4).double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).square().sum().backward()
    for value, truth in zip(model.parameters(), exact.parameters(), strict=True):
        assert value.grad.dtype is torch.float32
        # Operands, result and gradient are rounded once each.
        assert 0 < relative_error(value.grad, truth.grad) < 8 * 2.0**-8
