"""Loss scaling leaves every gradient the bits, the dtype and the strides it has without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpcompile.passes.graph import is_backward
from tests.helpers import layouts, operand_dtypes
from tests.scaling_tools import (
    INF,
    SCALES,
    flags,
    gradients,
    joint_graph,
    leaf,
    named,
    same_bits,
    scale,
    scaled,
    site,
)

INDEX = torch.tensor([0, 2, 0])
MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear layers": (lambda x, w, b: F.linear(F.linear(x, w, b).relu(), w.t()), (leaf(2, 3), leaf(4, 3), leaf(4))),
    "softmax": (lambda x: x.softmax(-1), (leaf(2, 3),)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (leaf(1, 2, 3, 4), leaf(1, 2, 3, 4))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (leaf(2, 3), leaf(3), leaf(3))),
    "convolution": (lambda x, w, b: F.conv1d(x, w, b).tanh(), (leaf(1, 2, 5), leaf(3, 2, 2), leaf(3))),
    "embedding": (lambda w, i: F.embedding(i, w).tanh(), (leaf(4, 3), INDEX)),
    "weight used twice": (lambda w, i: F.linear(F.embedding(i, w).tanh(), w), (leaf(4, 3), INDEX)),
    "indexing": (lambda x, i: x[i].exp() + x[:, :2].sum(), (leaf(3, 3), INDEX)),
    "pieces": (lambda x: x.split(1)[0].sin() * x.unbind(1)[2].cos(), (leaf(3, 3),)),
    "flipped": (lambda x: x.flip(0).exp(), (leaf(3, 3),)),
    "choice": (lambda x, y: torch.where(x > 0, x * y, y.exp()), (leaf(3, 3), leaf(3, 3))),
    "statistics": (lambda x: x.std(0) + x.amax(0) + x.logsumexp(0), (leaf(3, 3),)),
    "fp64": (lambda x, y: (x @ y.double()).tanh(), (leaf(2, 2, dtype=torch.float64), leaf(2, 2))),
    "several outputs": (lambda x, y: (x.exp(), (x * y).sum(), y.double().sin()), (leaf(2, 3), leaf(2, 3))),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_gradients_have_the_bits_they_have_without_scaling(model: str) -> None:
    fn, inputs = MODELS[model]
    gm = joint_graph(fn, *inputs)
    before, truth = layouts(gm), gradients(gm)
    scale(gm)
    assert layouts(gm)[:-1] == before
    for factor in SCALES:
        assert same_bits(gradients(gm, factor), truth)
        assert set(flags(gm, factor)) == {0.0}


@pytest.mark.parametrize("model", ["linear layers", "layer norm", "softmax", "embedding", "flipped"])
def test_an_ordinary_backward_has_the_factor_from_end_to_end(model: str) -> None:
    fn, inputs = MODELS[model]
    gm = joint_graph(fn, *inputs)
    # One for the tangent, one for each gradient, one for the flags: what is unscaled on the way and scaled again costs
    # two passes over memory, and in 16 bits the small numbers that it is scaled for.
    assert len(scale(gm).changes) == 1 + len(site(gm).gradients) + 1


def test_forward_does_not_read_the_scale() -> None:
    fn, inputs = MODELS["linear layers"]
    gm = scaled(fn, *inputs)
    readers = named(gm, site(gm).scale).users
    assert readers
    assert all(map(is_backward, readers))


def test_every_tangent_is_scaled() -> None:
    fn, inputs = MODELS["several outputs"]
    gm = scaled(fn, *inputs)
    for name in ("tangents_1", "tangents_2", "tangents_3"):
        (reader,) = named(gm, name).users
        assert reader is named(gm, f"scaled_{name}")
    assert named(gm, "scaled_tangents_3").meta["val"].dtype is torch.float64


def test_a_parameter_used_twice_has_one_gradient_and_one_flag() -> None:
    fn, inputs = MODELS["weight used twice"]
    gm = scaled(fn, *inputs)
    assert len(site(gm).gradients) == 1
    assert flags(gm) == [0.0]
    assert flags(gm, tangents_1=torch.full((3, 4), INF)) == [1.0]


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "an expanded number": (lambda x: x.sum(), (leaf(2, 3),)),
    "an expanded row": (lambda x: x.sum(0), (leaf(2, 3),)),
    "the tangent itself": (lambda x, y: x + y, (leaf(2, 3), leaf(2, 3))),
    "another shape": (lambda x: x.reshape(6) * 2, (leaf(2, 3),)),
    "half of a tangent": (lambda x, y: torch.cat([x, y], 1), (leaf(2, 3), leaf(2, 3))),
    "every other number of a tangent": (lambda x, y: torch.stack([x, y], 2), (leaf(2, 3), leaf(2, 3))),
    "the real part of a transform": (lambda x: torch.fft.fft(x), (leaf(2, 3),)),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_a_gradient_keeps_its_strides(case: str) -> None:
    fn, inputs = GRADIENTS[case]
    gm = joint_graph(fn, *inputs)
    before = layouts(gm)
    truth = gradients(gm)
    scale(gm)
    assert layouts(gm)[:-1] == before
    for factor in SCALES:
        found = gradients(gm, factor)
        assert same_bits(found, truth)
        assert [v.stride() for v in found] == [v.stride() for v in truth]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_tangent_is_scaled_in_float32(dtype: torch.dtype) -> None:
    gm = joint_graph(lambda x, y: x * y, leaf(3, dtype=dtype), leaf(3, dtype=dtype))
    truth = gradients(gm)
    scale(gm)
    assert operand_dtypes(named(gm, "scaled_tangents_1")) == {torch.float32}
    assert operand_dtypes(named(gm, "unscaled_l_x_")) == {torch.float32}
    assert same_bits(gradients(gm, 2.0**4), truth)


def test_a_float64_tangent_is_not_narrowed() -> None:
    gm = scaled(lambda x: x * 2, leaf(2, dtype=torch.float64))
    fine = torch.tensor([1 + 2.0**-52, 2.0**-140], dtype=torch.float64)
    assert same_bits(gradients(gm, 2.0**16, tangents_1=fine), [2 * fine])
