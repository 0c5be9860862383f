"""Operations with their arguments, those that carry a factor of their operands and those that do not."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from mpcompile.passes.graph import packet_name

aten, prims = torch.ops.aten, torch.ops.prims
Fill = Callable[..., Tensor]


class Case:
    """An operation with its arguments; ``linear``: the sets of operands whose common factor the result has.

    Operands are counted over the floating-point tensors among the arguments. A tuple of sizes stands for a tensor of
    random numbers, a function for one made of such tensors.
    """

    def __init__(self, target: Any, *args: Any, linear: Collection[set[int]] = ({0},), **kwargs: Any) -> None:
        self.target, self._args, self._kwargs, self.linear = target, args, kwargs, linear

    def arguments(self, seed: int = 0, size: float = 1.0) -> tuple[Any, Any]:
        """Positional arguments and keyword arguments; tensors have values of about ``size``."""
        generator = torch.Generator().manual_seed(seed)

        def fill(*shape: int) -> Tensor:
            return size * torch.randn(shape, generator=generator)

        def made(value: Any) -> Any:
            if isinstance(value, tuple):
                return fill(*value)
            if isinstance(value, list):
                return [made(item) for item in value]
            return value(fill) if callable(value) else value

        return [made(value) for value in self._args], self._kwargs


def complexes(*shape: int) -> Callable[[Fill], Tensor]:
    return lambda fill: torch.complex(fill(*shape), fill(*shape))


def halves(*shape: int) -> Callable[[Fill], Tensor]:
    return lambda fill: fill(*shape).bfloat16()


def triangle(fill: Fill) -> Tensor:
    """A matrix to solve with that is far from singular."""
    return torch.tril(fill(3, 3), -1).clamp(-1, 1) + 2 * torch.eye(3)


ROWS = torch.tensor([0, 2, 1])
PLACES = torch.tensor([[0, 2, 1], [1, 1, 0]])
ROW_MASK = torch.tensor([[True], [False], [True]])
MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
PIVOTS = torch.tensor([1, 2, 3], dtype=torch.int32)
M, V, CUBE = (3, 3), (3,), (2, 3, 3)
WINDOW = ([1], [0], [1], False, [0], 1)  # stride, padding, dilation, transposed, output padding, groups
PAIR = ([2, 2], [1, 1], [0, 0], [1, 1])  # kernel, dilation, padding, stride
EACH, BOTH, ADDED = ({0}, {1}), ({0, 1},), ({0, 1}, {0, 2})
THREE = ({0}, {1}, {2})

CASES = [
    Case(aten.view.default, M, [9]),
    Case(aten.reshape.default, M, [9]),
    Case(aten._unsafe_view.default, M, [9]),
    Case(aten.permute.default, M, [1, 0]),
    Case(aten.transpose.int, M, 0, 1),
    Case(aten.t.default, M),
    Case(aten.unsqueeze.default, M, 0),
    Case(aten.squeeze.dim, (1, 3), 0),
    Case(aten.expand.default, (1, 3), [2, 3]),
    Case(aten.alias.default, M),
    Case(aten.detach.default, M),
    Case(aten.slice.Tensor, M, 0, 0, 2),
    Case(aten.select.int, M, 0, 1),
    Case(aten.clone.default, M),
    Case(aten.contiguous.default, M),
    Case(aten.split.Tensor, M, 2),
    Case(aten.split_with_sizes.default, M, [1, 2]),
    Case(aten.chunk.default, M, 2),
    Case(aten.unbind.int, M),
    Case(aten.as_strided.default, M, [2, 2], [3, 1]),
    Case(aten.diagonal.default, M),
    Case(aten.unfold.default, M, 0, 2, 1),
    Case(aten.flip.default, M, [0]),
    Case(prims.rev.default, M, [0]),
    Case(aten.roll.default, M, [1]),
    Case(aten.repeat.default, M, [2, 1]),
    Case(aten.tile.default, M, [2]),
    Case(aten.constant_pad_nd.default, M, [1, 1]),
    Case(aten.reflection_pad1d.default, (1, 3), [1, 1]),
    Case(aten.reflection_pad2d.default, (1, 3, 3), [1, 1, 1, 1]),
    Case(aten.replication_pad1d.default, (1, 3), [1, 1]),
    Case(aten.replication_pad2d.default, (1, 3, 3), [1, 1, 1, 1]),
    Case(prims.convert_element_type.default, M, torch.float64),
    Case(aten._to_copy.default, M, dtype=torch.bfloat16),
    Case(prims.device_put.default, M, torch.device("cpu")),
    Case(aten.lift_fresh_copy.default, M),
    Case(aten.tril.default, M),
    Case(aten.triu.default, M),
    Case(aten.index.Tensor, M, [ROWS]),
    Case(aten._unsafe_index.Tensor, M, [ROWS]),
    Case(aten._unsafe_masked_index.default, M, ROW_MASK, [ROWS], 0),
    Case(aten.index_select.default, M, 0, ROWS),
    Case(aten.gather.default, M, 0, PLACES),
    Case(aten.embedding.default, M, ROWS),
    Case(aten.take.default, M, ROWS),
    Case(aten.masked_select.default, M, MASK),
    Case(aten.sum.dim_IntList, M, [0]),
    Case(aten.mean.dim, M, [0]),
    Case(aten.cumsum.default, M, 0),
    Case(aten.neg.default, M),
    Case(aten.trace.default, M),
    Case(aten.avg_pool1d.default, (1, 4), [2]),
    Case(aten.avg_pool2d.default, (1, 4, 4), [2, 2]),
    Case(aten.avg_pool3d.default, (1, 2, 2, 2), [2, 2, 2]),
    Case(aten._adaptive_avg_pool2d.default, (1, 4, 4), [3, 3]),
    Case(aten.upsample_nearest1d.default, (1, 1, 3), [5]),
    Case(aten.upsample_nearest2d.default, (1, 1, 3, 3), [5, 5]),
    Case(aten.upsample_nearest3d.default, (1, 1, 2, 2, 2), [3, 3, 3]),
    Case(aten.upsample_linear1d.default, (1, 1, 3), [5], False),
    Case(aten.upsample_bilinear2d.default, (1, 1, 3, 3), [5, 5], False),
    Case(aten.upsample_bicubic2d.default, (1, 1, 3, 3), [5, 5], False),
    Case(aten.upsample_trilinear3d.default, (1, 1, 2, 2, 2), [3, 3, 3], False),
    Case(aten.pixel_shuffle.default, (4, 2, 2), 2),
    Case(aten.pixel_unshuffle.default, (1, 4, 4), 2),
    Case(aten.channel_shuffle.default, (1, 4, 2), 2),
    Case(aten.im2col.default, (1, 3, 3), *PAIR),
    Case(aten.col2im.default, (4, 4), [3, 3], *PAIR),
    Case(aten._fft_r2c.default, (2, 4), [1], 0, True),
    Case(aten._fft_c2r.default, complexes(2, 3), [1], 0, 4),
    Case(aten._fft_c2c.default, complexes(2, 4), [1], 0, True),
    Case(aten.view_as_real.default, complexes(2, 3)),
    Case(aten.view_as_complex.default, (3, 2)),
    Case(aten.real.default, complexes(2, 3)),
    Case(aten.imag.default, complexes(2, 3)),
    Case(aten._conj.default, complexes(2, 3)),
    Case(aten._conj_physical.default, complexes(2, 3)),
    Case(aten.resolve_conj.default, lambda fill: complexes(2, 3)(fill).conj()),
    Case(aten.resolve_neg.default, M),
    Case(prims.broadcast_in_dim.default, V, [2, 3], [1]),
    Case(aten.triangular_solve.default, M, triangle),
    Case(aten.cholesky_solve.default, M, triangle),
    Case(aten.add.Tensor, M, M, alpha=3, linear=BOTH),
    Case(aten.sub.Tensor, M, M, linear=BOTH),
    Case(aten.cat.default, [M, M, M], linear=({0, 1, 2},)),
    Case(aten.stack.default, [M, M], linear=BOTH),
    Case(aten.where.self, MASK, M, M, linear=BOTH),
    Case(aten.slice_scatter.default, M, (2, 3), 0, 0, 2, linear=BOTH),
    Case(aten.select_scatter.default, M, V, 0, 1, linear=BOTH),
    Case(aten.as_strided_scatter.default, M, (2, 2), [2, 2], [3, 1], linear=BOTH),
    Case(aten.diagonal_scatter.default, M, V, linear=BOTH),
    Case(aten.index_put.default, M, [ROWS], M, True, linear=BOTH),
    Case(aten._unsafe_index_put.default, M, [ROWS], M, True, linear=BOTH),
    Case(aten._unsafe_masked_index_put_accumulate.default, M, ROW_MASK, [ROWS], M, linear=BOTH),
    Case(aten.scatter.src, M, 0, PLACES[:1], (1, 3), linear=BOTH),
    Case(aten.scatter_add.default, M, 0, PLACES, (2, 3), linear=BOTH),
    Case(aten.index_add.default, M, 0, ROWS, M, alpha=3, linear=BOTH),
    Case(aten.index_copy.default, M, 0, ROWS, M, linear=BOTH),
    Case(aten.masked_scatter.default, M, MASK, M, linear=BOTH),
    Case(aten.copy.default, M, M, linear=BOTH),
    Case(aten.mul.Tensor, M, M, linear=EACH),
    Case(aten.mm.default, M, M, linear=EACH),
    Case(aten.bmm.default, (1, 2, 3), (1, 3, 2), linear=EACH),
    Case(aten.dot.default, V, V, linear=EACH),
    Case(aten.vdot.default, V, V, linear=EACH),
    Case(aten.mv.default, M, V, linear=EACH),
    Case(aten.outer.default, V, V, linear=EACH),
    Case(aten.ger.default, V, V, linear=EACH),
    Case(aten.matmul.default, M, V, linear=EACH),
    Case(aten.linear.default, M, M, linear=EACH),
    Case(aten.einsum.default, "ij,jk,k->i", [M, M, V], linear=THREE),
    Case(aten.tensordot.default, M, M, [0], [1], linear=EACH),
    Case(aten.convolution.default, (1, 2, 4), (3, 2, 2), None, *WINDOW, linear=EACH),
    Case(aten._convolution.default, (1, 2, 4), (3, 2, 2), None, *WINDOW, False, False, True, True, linear=EACH),
    Case(aten._grouped_mm.default, halves(1, 8, 8), halves(1, 8, 8), linear=EACH),
    Case(aten.bilinear.default, M, M, CUBE, None, linear=THREE),
    Case(aten._trilinear.default, *(CUBE, CUBE, CUBE), [], [], [], [0], linear=THREE),
    Case(aten.cross.default, M, M, 1, linear=EACH),
    Case(aten.kron.default, V, V, linear=EACH),
    Case(aten.linalg_cross.default, M, M, linear=EACH),
    Case(aten.addmm.default, V, M, M, beta=2, alpha=3, linear=ADDED),
    Case(aten.baddbmm.default, CUBE, CUBE, CUBE, linear=ADDED),
    Case(aten.addbmm.default, M, CUBE, CUBE, linear=ADDED),
    Case(aten.addmv.default, V, M, V, linear=ADDED),
    Case(aten.addr.default, M, V, V, linear=ADDED),
    Case(aten.addcmul.default, M, M, M, value=3, linear=ADDED),
    *([Case(prims.fma.default, M, M, M, linear=({0, 2}, {1, 2}))] if hasattr(prims, "fma") else []),  # newer torch
    Case(aten.div.Tensor, M, M),
    Case(aten.true_divide.Tensor, M, M),
    Case(aten.linalg_solve_triangular.default, triangle, M, upper=False, linear=({1},)),
    Case(aten._linalg_solve_ex.default, triangle, M, linear=({1},)),
    Case(aten.linalg_solve.default, triangle, M, linear=({1},)),
    Case(aten.linalg_lu_solve.default, triangle, PIVOTS, M, linear=({1},)),
    Case(aten.linalg_vecdot.default, M, M),
    Case(aten.masked_fill.Scalar, M, MASK, 0.0),
    # Operations of backward, which name the incoming gradient so.
    Case(aten.threshold_backward.default, M, M, 0.0),
    Case(aten.tanh_backward.default, M, M),
    Case(aten.embedding_dense_backward.default, M, ROWS, 4, -1, False),
    Case(aten._softmax_backward_data.default, M, lambda fill: fill(3, 3).softmax(1), 1, torch.float32),
    Case(aten.convolution_backward.default, (1, 3, 3), (1, 2, 4), (3, 2, 2), [3], *WINDOW, [True, True, True]),
]
BY_NAME = {packet_name(case.target): case for case in CASES}

REFUSED = {
    "a number is added": Case(aten.add.Tensor, M, 1.0),
    "subtracted from a number": Case(aten.rsub.Scalar, M, 1.0),
    "padded with a number": Case(aten.constant_pad_nd.default, M, [1, 1], 1.0),
    "a number outside": Case(aten._unsafe_masked_index.default, M, ROW_MASK, [ROWS], 1.0),
    "filled with a number": Case(aten.masked_fill.Scalar, M, MASK, 1.0),
    "filled with a tensor": Case(aten.masked_fill.Tensor, M, MASK, ()),
    "a number is scattered": Case(aten.scatter.value, M, 0, PLACES, 1.0),
    "a number elsewhere": Case(aten.where.ScalarOther, MASK, M, 1.0),
    "other summands": Case(aten.cat.default, [M, M]),
    "divided and rounded": Case(aten.div.Tensor_mode, M, M, rounding_mode="floor"),
    "divided by": Case(aten.reciprocal.default, M),
    "a convolution's bias": Case(aten.convolution.default, (1, 2, 4), (3, 2, 2), V, *WINDOW),
    "a linear layer's bias": Case(aten.linear.default, M, M, V),
    "a bilinear layer's bias": Case(aten.bilinear.default, M, M, CUBE, (2,)),
    "another addend": Case(aten.addmm.default, V, M, M),
    "to integers": Case(prims.convert_element_type.default, M, torch.int32),
    "to booleans": Case(aten._to_copy.default, M, dtype=torch.bool),
    "summed as integers": Case(aten.sum.dim_IntList, M, [0], dtype=torch.int64),
    "clipped": Case(aten.clamp.default, M, -0.5, 0.5),
    "rounded": Case(aten.round.default, M),
    "the sign": Case(aten.sign.default, M),
    "compared": Case(aten.gt.Scalar, M, 0.5),
    "a power": Case(aten.pow.Tensor_Scalar, M, 2),
    "a nonlinear function": Case(aten.tanh.default, M),
    "a normalisation": Case(aten._softmax.default, M, 1, False),
}
ALL = {**BY_NAME, **REFUSED}
