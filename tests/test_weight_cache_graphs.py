"""What graphs make of low copies: static inputs, saved as they are, multiplied as they are held."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from mpcompile import compiler, torch_compat
from mpcompile.execution import cached_graph
from mpcompile.graph_inputs import GraphInputs
from mpcompile.joint_pass import emulates
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.emulation import emulate_low_products
from mpcompile.passes.graph import EXACT, LOW_COPY, is_cast, is_view, parameter_name, viewed
from mpcompile.passes.wide_products import EMULATED, WIDE
from tests.helpers import Net, calls, joint
from tests.process_tools import assert_warm, train_in_process
from tests.weight_cache_tools import cached, copies, rounded

X = torch.linspace(-1, 1, 40).view(5, 8)


class Saved:
    """The inputs, outputs and static inputs of the graphs after partitioning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.static: list[list[int]] = []
        partition = compiler.min_cut_rematerialization_partition

        def watching(*args: Any, **kwargs: Any) -> Any:
            self.static.append(list(kwargs.get("static_lifetime_input_indices") or ()))
            forward, backward = partition(*args, **kwargs)
            self.graphs += [forward, backward]
            return forward, backward

        monkeypatch.setattr(compiler, "min_cut_rematerialization_partition", watching)


def test_the_copies_are_static_inputs_beside_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(monkeypatch)
    cached(Net())(X)
    (forward, _) = saved.graphs
    inputs = forward.graph.find_nodes(op="placeholder")
    # Four parameters and, last, two copies; the activation is not static.
    assert len(inputs) == 7
    assert len(saved.static[0]) == 6
    assert set(saved.static[0]) >= {5, 6}


def test_a_copy_is_saved_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(monkeypatch)
    cached(Net())(X)
    forward, backward = saved.graphs
    values = {node.name: node.meta["val"] for node in forward.graph.find_nodes(op="placeholder")}
    low = {name: value.shape for name, value in values.items() if value.dtype is torch.bfloat16}
    assert list(low.values()) == [(16, 8), (4, 16)]
    kept = [node for node in backward.graph.find_nodes(op="placeholder") if node.meta["val"].shape == (4, 16)]
    assert [node.name for node in kept] == [list(low)[1]]


def test_nothing_casts_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(monkeypatch)
    cached(Net())(X)
    casts = [node for gm in saved.graphs for node in calls(gm) if is_cast(node)]
    shapes = {tuple(node.args[0].meta["val"].shape) for node in casts if node.meta["val"].dtype is torch.bfloat16}
    assert shapes
    assert not shapes & {(16, 8), (4, 16)}


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_a_copy_held_in_fp32_is_multiplied_as_it_is(held: torch.dtype) -> None:
    gm = with_copies(Net(), held)
    run_passes(gm, Policy())
    exact = [node for node in calls(gm) if EXACT in node.meta]
    assert len(exact) == (2 if held is torch.float32 else 0)
    made = [node for node in calls(gm) if _origin(node) in ("copy_0", "copy_1")]
    # What is made of a copy is made again in backward, so that the copy itself is saved: then torch sees it change.
    assert len(made) > 2
    assert all(node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE for node in made)
    emulate_low_products(gm, Policy())
    gm.graph.eliminate_dead_code()
    cast = [node for node in calls(gm) if is_cast(node) and viewed(node.args[0]).name in ("copy_0", "copy_1")]
    # Both in forward, and the last layer's in backward.
    assert len(cast) == (3 if held is torch.bfloat16 else 0)


def test_products_that_leave_in_fp32_read_the_copies_as_they_are() -> None:
    gm = with_copies(Net(), torch.float32)
    gm.meta[EMULATED] = True
    run_passes(gm, Policy(preset="accurate"))
    gm.graph.eliminate_dead_code()
    products = [node for node in calls(gm) if node.meta.get(WIDE)]
    read = [viewed(operand).name for node in products for operand in node.all_input_nodes]
    assert sorted(name for name in read if name.startswith("copy")) == ["copy_0", "copy_1", "copy_1"]
    assert not [node for node in calls(gm) if is_cast(node) and viewed(node.args[0]).name.startswith("copy")]


def _origin(node: fx.Node) -> str:
    """The node below views and casts that round nothing."""
    while is_view(node) or EXACT in node.meta:
        node = node.args[0]
    return node.name


def with_copies(model: nn.Module, held: torch.dtype) -> fx.GraphModule:
    """The joint graph of two layers with a copy of each weight."""
    gm = joint(model, X)
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = [node for node in placeholders if parameter_name(node).endswith("weight")]
    for index, weight in enumerate(weights):
        with gm.graph.inserting_after(placeholders[len(placeholders) - 2]):
            copy = gm.graph.placeholder(f"copy_{index}")
        copy.meta["val"] = weight.meta["val"].to(held)
        weight.meta[LOW_COPY] = (copy.name, torch.bfloat16)
    return gm


def test_the_copies_are_in_the_cache_key() -> None:
    facts: dict[str, Any] = {"parameters": {0: "w"}, "weights": frozenset((0,)), "slots": {}, "count": 2}
    facts |= {"beyond_range": frozenset(), "wide_gradients": frozenset()}
    keys = [GraphInputs(**facts, copies={0: low}).key() for low in (torch.bfloat16, torch.float16)]
    assert len({GraphInputs(**facts).key(), *keys}) == 3
    assert GraphInputs(**facts).key() != GraphInputs(**{**facts, "weights": frozenset()}).key()


def test_the_trailing_inputs_are_scale_probe_and_copies() -> None:
    seen: list[tuple[Any, ...]] = []
    original = cached_graph.Binding.copies_of

    def watching(self: Any, parameters: Any) -> Any:
        found = original(self, parameters)
        seen.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_graph.Binding, "copies_of", watching)
        cached(Net(), dtype="fp16")(X)
    assert [tuple(value.shape) for value in seen[0]] == [(16, 8), (4, 16)]


def test_a_model_under_fsdp_has_no_copies() -> None:
    net = Net()
    for module in net.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    assert torch_compat.is_sharded(net)
    assert not torch_compat.is_sharded(Net())
    assert not torch_compat.is_sharded(None)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("rows", "policy", "held"),
    [(1, "default", torch.bfloat16), (3, "default", torch.float32), (1, "accurate", torch.float32)],
)
def test_inference_on_one_row_reads_copies_in_the_low_type_where_results_are_rounded(
    rows: int, policy: str, held: torch.dtype
) -> None:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(rows, 64)
    compiled = cached(net, compiler="inductor", policy=policy)
    with torch.no_grad():
        output = compiled(x)
    assert {copy.value.dtype for copy in copies() if copy.is_of(net[0].weight) or copy.is_of(net[2].weight)} == {held}
    assert torch.equal(output, rounded(net.requires_grad_(False), x, compiler="inductor", policy=policy))
    exact = net.double()(x.double())
    # Two layers in a row, with operands and results rounded by 2^-8 at most, relative to sums of magnitudes.
    magnitude = net[2].weight.abs() @ (net[0].weight.abs() @ x.abs().double().t() + net[0].bias.abs()[:, None])
    assert ((output - exact).abs().t() <= 6 * 2**-8 * (magnitude + net[2].bias.abs()[:, None])).all()


PROCESS = """
options = {"dtype": "bf16", "weight_cache": True}
compiled = torch.compile(model, backend="mixprec", options=options)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
outputs = []
for _ in range(2):
    output = compiled(x)
    output.square().sum().backward()
    optimizer.step()
    outputs.append(output.tolist())
held = sorted({str(copy.value.dtype) for copy in mpcompile.execution.low_copies._copies.values()})
answer(outputs=outputs, held=held)
"""


def process(folder: Path) -> dict[str, Any]:
    """Train two steps in a new process."""
    return train_in_process(folder, PROCESS)


@pytest.mark.inductor
def test_a_second_process_starts_warm_and_computes_the_same(tmp_path: Path) -> None:
    cold, warm = process(tmp_path), process(tmp_path)
    assert_warm(cold, warm)
    assert warm["outputs"] == cold["outputs"]
    # Where products are emulated in fp32, the copies wait in fp32.
    emulated = emulates(Policy(), [torch.ones(1)])
    assert cold["held"] == warm["held"] == ["torch.float32" if emulated else "torch.bfloat16"]
    assert cold["outputs"][0] != cold["outputs"][1]
