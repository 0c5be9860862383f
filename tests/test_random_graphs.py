"""Random programs of all classes of operators: what holds for every graph holds for these.

Beside each value runs a bound of its error: a low product adds one rounding per operand and one of its result to
what its operands bring, and every reader may read a value rounded once. So the bound of a program of one product
is that of the product, and that of a deeper one follows from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

from mpcompile.passes import Policy, plan_compute, run_passes
from mpcompile.passes.edit import run_fake
from mpcompile.passes.graph import CAST, arguments
from mpcompile.passes.op_classes import roles_of
from tests.helpers import UNIT_ROUNDOFF, calls, flat, joint, layouts, reasons, text, trace

Tensor = torch.Tensor
Bound = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Op:
    """A step of a program, and how errors of its arguments and its own rounding bound the error of its result."""

    run: Callable[[Tensor, Tensor], Tensor]
    bound: Bound | None = None


def _moves(run: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return Op(run, lambda a, b, ea, eb, u: run(ea, eb))


def _smooth(run: Callable[[Tensor, Tensor], Tensor], slope: float = 1.0) -> Op:
    return Op(run, lambda a, b, ea, eb, u: slope * ea)


def _product(run: Callable[[Tensor, Tensor], Tensor]) -> Op:
    def bound(a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, u: float) -> Tensor:
        # The operands' own rounding is in ea and eb already; what is left is the rounding of the result.
        largest = run(a.abs() + ea, b.abs() + eb)
        return largest * (1 + u) - run(a.abs(), b.abs())

    return Op(run, bound)


def _times(a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, u: float) -> Tensor:
    return a.abs() * eb + b.abs() * ea + ea * eb


def _steep(a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, u: float) -> Tensor:
    return torch.exp(a.clamp(-3, 3)) * torch.expm1(ea)


def _share(a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, u: float) -> Tensor:
    return a.softmax(-1) * torch.expm1(2 * ea.amax(-1, keepdim=True)) if ea.numel() else ea


def _normalised(a: Tensor, b: Tensor) -> Tensor:
    if not a.numel():
        raise IndexError("torch warns of statistics of nothing")
    return F.layer_norm(F.pad(a, (1, 1)), (a.shape[-1] + 2,))


OPS: dict[str, Op] = {
    "mm": _product(lambda a, b: a @ b),
    "mm_t": _product(lambda a, b: a @ b.t()),
    "t_mm": _product(lambda a, b: a.t() @ b),
    "bmm": _product(lambda a, b: torch.bmm(a[None], b[None])[0]),
    "mv": _product(lambda a, b: torch.mv(a, b[0])),
    "linear": _product(lambda a, b: F.linear(a, b, b[:, 0])),
    "conv": _product(lambda a, b: F.conv1d(a[None], b[..., None])[0]),
    "relu": _smooth(lambda a, b: a.relu()),
    "tanh": _smooth(lambda a, b: a.tanh()),
    "gelu": _smooth(lambda a, b: F.gelu(a), slope=1.2),
    "exp": Op(lambda a, b: a.clamp(-3, 3).exp(), _steep),
    "add": Op(lambda a, b: a + b, lambda a, b, ea, eb, u: ea + eb),
    "mul": Op(lambda a, b: a * b, _times),
    "maximum": Op(torch.maximum, lambda a, b, ea, eb, u: torch.maximum(ea, eb)),
    "softmax": Op(lambda a, b: a.softmax(-1), _share),
    "sum": _moves(lambda a, b: a.sum(-1, keepdim=True)),
    "mean": _moves(lambda a, b: a.mean(0)),
    "t": _moves(lambda a, b: a.t()),
    "flat": _moves(lambda a, b: a.reshape(-1)),
    "rows": _moves(lambda a, b: a[1:]),
    "first": _moves(lambda a, b: a[0]),
    "half": _moves(lambda a, b: a.chunk(2, -1)[0]),
    "split": _moves(lambda a, b: a.split(1)[0]),
    "cat": _moves(lambda a, b: torch.cat([a, b])),
    "expand": _moves(lambda a, b: a[None].expand(2, *a.shape).reshape(-1, a.shape[-1])),
    "norm": Op(_normalised),
    "argmax": Op(lambda a, b: a.argmax(-1)),
    "above": Op(lambda a, b: a > b),
    "where": Op(lambda a, b: torch.where(a > 0, a, b)),
    "lookup": Op(lambda a, b: F.embedding(a.argmax(-1), b)),
    "gather": Op(lambda a, b: a.gather(-1, a.argmax(-1, keepdim=True))),
    "low": Op(lambda a, b: a.bfloat16().float()),
    "double": Op(lambda a, b: (a.double() * 2).float()),
}
PRODUCTS = ("mm", "mm_t", "t_mm", "bmm", "mv", "linear", "conv")


@dataclass(frozen=True)
class Program:
    """Steps over a growing list of values; the first ones are the inputs, ``outputs`` are returned."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, int, int], ...]
    outputs: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for name, i, j in self.steps:
            values.append(OPS[name].run(values[i], values[j]))
        return tuple(values[i] for i in self.outputs)

    def inputs(self) -> list[Tensor]:
        """Inputs that depend on nothing but the program."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def bounds(self, low: torch.dtype) -> list[tuple[Tensor, Tensor] | None]:
        """Every output in fp64 with a bound of its error; None where no bound is known."""
        known: list[tuple[Tensor, Tensor] | None]
        known = [(v.double(), torch.zeros_like(v, dtype=torch.float64)) for v in self.inputs()]
        for name, i, j in self.steps:
            known.append(_bounded(OPS[name], known[i], known[j], UNIT_ROUNDOFF[low]))
        return [known[i] for i in self.outputs]


def _bounded(op: Op, first: Any, second: Any, unit: float) -> tuple[Tensor, Tensor] | None:
    if op.bound is None or first is None or second is None:
        return None
    (a, ea), (b, eb) = first, second
    ea, eb = ea + unit * (a.abs() + ea), eb + unit * (b.abs() + eb)
    value = op.run(a, b)
    error = op.bound(a, b, ea, eb, unit)
    return value, error + 64 * 2.0**-24 * (value.abs() + error + 1)


@st.composite
def programs(draw: st.DrawFn, names: tuple[str, ...] = (*OPS, *PRODUCTS, *PRODUCTS), most: int = 9) -> Program:
    """Programs whose every step is legal, over shapes with sizes from 0 to 5."""
    size = st.sampled_from([3, 3, 3, 3, 3, 3, 5, 2, 1, 0])
    shapes = tuple(draw(st.lists(st.tuples(size, size), min_size=2, max_size=3)))
    program = Program(shapes, (), ())
    values = program.inputs()
    steps: list[tuple[str, int, int]] = []
    for _ in range(draw(st.integers(1, most))):
        index = st.integers(0, len(values) - 1)
        step = draw(st.tuples(st.sampled_from(names), index, index))
        value = _attempt(OPS[step[0]], values[step[1]], values[step[2]])
        if value is not None:
            steps.append(step)
            values.append(value)
    computed = range(len(shapes), len(values)) or range(len(values))
    outputs = draw(st.lists(st.sampled_from(computed), min_size=1, max_size=3))
    return Program(shapes, tuple(steps), tuple({*outputs, len(values) - 1}))


def _attempt(op: Op, a: Tensor, b: Tensor) -> Tensor | None:
    if not (a.is_floating_point() and b.is_floating_point()):
        return None
    try:
        return op.run(a, b)
    except (RuntimeError, IndexError):  # the shapes do not fit
        return None


def check_graph(gm: fx.GraphModule, policy: Policy) -> None:
    """Rewrite a graph (under the verifier) and check what holds for every graph."""
    before = layouts(gm)
    planned = [n for n, d in plan_compute(gm, policy).items() if d.precision == "low"]
    run_passes(gm, policy)
    event(f"{len(planned)} low products" if len(planned) < 4 else "many low products")
    assert layouts(gm) == before
    for node in planned:
        names = roles_of(node.target).operands
        operands = [v.meta["val"] for name, v in arguments(node) if name in names and isinstance(v, fx.Node)]
        assert {v.dtype for v in operands} == {policy.dtype}
    for node in calls(gm):
        recorded, true = flat(node.meta["val"]), flat(run_fake(node))
        assert [(v.dtype, v.shape, v.stride()) for v in recorded] == [(v.dtype, v.shape, v.stride()) for v in true]
    once = text(gm)
    assert reasons(run_passes(gm, policy)) == []
    assert text(gm) == once


def is_exact(node: fx.Node) -> bool:
    """Whether no cast of ours lies on any way to a node."""
    seen, frontier = {node}, [node]
    while frontier:
        sources = set(frontier.pop().all_input_nodes) - seen
        seen |= sources
        frontier += sources
    return not any(CAST in source.meta for source in seen)


def check_values(program: Program, gm: fx.GraphModule, before: list[Tensor], low: torch.dtype) -> None:
    """Outputs that no rounding reaches are the same bits; others are within their bound."""
    inputs = program.inputs()
    nodes = gm.graph.output_node().args[0]
    for found, old, node, known in zip(gm(*inputs), before, nodes, program.bounds(low), strict=True):
        assert found.dtype == old.dtype
        if is_exact(node):
            assert torch.equal(found, old) or bool(old.isnan().any())
        elif known is not None:
            value, bound = known
            event("within a bound")
            assert ((found.double() - value).abs() <= bound).all()


def check_forward(program: Program, low: torch.dtype) -> None:
    """Trace, rewrite and run a program."""
    gm = trace(program, *program.inputs())
    before = list(gm(*program.inputs()))
    check_graph(gm, Policy(dtype=low))
    check_values(program, gm, before, low)


def check_gradients(program: Program, low: torch.dtype) -> None:
    """Rewrite the joint graph of a program that has a gradient."""
    leaves = [v.requires_grad_() for v in program.inputs()]

    def computed(*inputs: Tensor) -> list[Tensor]:  # AOTAutograd makes no graph of views alone
        return [v + 1 if v.is_floating_point() else v for v in program(*inputs)]

    if any(v.requires_grad for v in computed(*leaves)):
        check_graph(joint(computed, *leaves), Policy(dtype=low))


LOWS = st.sampled_from([torch.bfloat16, torch.float16])
QUICK = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
THOROUGH = settings(QUICK, max_examples=400, derandomize=False)


@QUICK
@given(programs(), LOWS)
def test_forward_graphs(program: Program, low: torch.dtype) -> None:
    check_forward(program, low)


@QUICK
@given(programs(PRODUCTS, most=1), LOWS)
def test_single_products(program: Program, low: torch.dtype) -> None:
    check_forward(program, low)


@settings(QUICK, max_examples=12)
@given(programs(most=6), LOWS)
def test_joint_graphs(program: Program, low: torch.dtype) -> None:
    torch._dynamo.reset()
    check_gradients(program, low)


@pytest.mark.slow
@THOROUGH
@given(programs(most=16), LOWS)
def test_many_forward_graphs(program: Program, low: torch.dtype) -> None:
    check_forward(program, low)


@pytest.mark.slow
@settings(THOROUGH, max_examples=200)
@given(programs(most=10), LOWS)
def test_many_joint_graphs(program: Program, low: torch.dtype) -> None:
    torch._dynamo.reset()
    check_gradients(program, low)
