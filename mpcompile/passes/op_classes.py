"""The one table of operator classes, for all devices, forward and backward.

``LOW``     reads operands in the low type and accumulates in fp32 (tensor cores, AMX, oneDNN bf16).
``FP32``    computes in fp32: it sums many terms, or has a range or a condition number low types cannot hold.
``FOLLOW``  elementwise: computes in fp32 inside a fused kernel, so casting around it would only add traffic.
``EXACT``   moves or selects elements: no rounding of its own.
``OPAQUE``  unlisted and custom ops: see exactly the dtypes they were traced with.

To add an op: put its name (as in ``torch.ops.aten``) in the group whose reason fits, or call ``register_op``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpcompile.passes.graph import packet_name


class OpClass(enum.Enum):
    """How the compute plan treats an operator."""

    LOW = "low"
    FP32 = "fp32"
    FOLLOW = "follow"
    EXACT = "exact"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Roles:
    """Which arguments and results of a LOW operator are of the low type."""

    operands: tuple[str, ...]
    """Argument names, as in the operator's schema; their fp32 tensors are narrowed."""
    outputs: tuple[int, ...] = (0,)
    """Indices of the results that come out low (0 for an op with one result)."""
    contraction: tuple[str, int] | None = None
    """Argument and dimension over which products are summed; of size 1 it is no matmul at all."""


_ATTENTION = ("query", "key", "value")
_ATTENTION_BACKWARD = (*_ATTENTION, "out")

# Products accumulated in fp32 by the hardware: the only ops that gain from low operands.
LOW_OPS: dict[str, Roles] = {
    # matrix products
    "mm": Roles(("self", "mat2"), contraction=("self", -1)),
    "bmm": Roles(("self", "mat2"), contraction=("self", -1)),
    "addmm": Roles(("self", "mat1", "mat2"), contraction=("mat1", -1)),
    "_addmm_activation": Roles(("self", "mat1", "mat2"), contraction=("mat1", -1)),
    "baddbmm": Roles(("self", "batch1", "batch2"), contraction=("batch1", -1)),
    "addbmm": Roles(("self", "batch1", "batch2"), contraction=("batch1", -1)),
    "mv": Roles(("self", "vec"), contraction=("self", -1)),
    "addmv": Roles(("self", "mat", "vec"), contraction=("mat", -1)),
    "matmul": Roles(("self", "other"), contraction=("self", -1)),
    "linear": Roles(("input", "weight", "bias"), contraction=("input", -1)),
    "einsum": Roles(("tensors",)),
    "bilinear": Roles(("input1", "input2", "weight", "bias")),
    "_trilinear": Roles(("i1", "i2", "i3")),
    "_grouped_mm": Roles(("self", "mat2", "bias")),
    # convolutions
    "convolution": Roles(("input", "weight", "bias")),
    "_convolution": Roles(("input", "weight", "bias")),
    "conv1d": Roles(("input", "weight", "bias")),
    "conv2d": Roles(("input", "weight", "bias")),
    "conv3d": Roles(("input", "weight", "bias")),
    "conv_transpose1d": Roles(("input", "weight", "bias")),
    "conv_transpose2d": Roles(("input", "weight", "bias")),
    "conv_transpose3d": Roles(("input", "weight", "bias")),
    "convolution_backward": Roles(("grad_output", "input", "weight"), outputs=(0, 1)),
    # attention, in every kernel torch dispatches it to; the statistics (logsumexp) stay fp32
    "scaled_dot_product_attention": Roles(_ATTENTION),
    "_scaled_dot_product_flash_attention_for_cpu": Roles(_ATTENTION),
    "_scaled_dot_product_flash_attention": Roles(_ATTENTION),
    "_scaled_dot_product_efficient_attention": Roles(_ATTENTION),
    "_scaled_dot_product_cudnn_attention": Roles(_ATTENTION),
    "_scaled_dot_product_fused_attention_overrideable": Roles(_ATTENTION),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Roles(
        ("grad_out", *_ATTENTION_BACKWARD), outputs=(0, 1, 2)
    ),
    "_scaled_dot_product_flash_attention_backward": Roles(("grad_out", *_ATTENTION_BACKWARD), outputs=(0, 1, 2)),
    "_scaled_dot_product_efficient_attention_backward": Roles(("grad_out_", *_ATTENTION_BACKWARD), outputs=(0, 1, 2)),
    "_scaled_dot_product_cudnn_attention_backward": Roles(("grad_out", *_ATTENTION_BACKWARD), outputs=(0, 1, 2)),
}

CHOSEN_FOR_FP32 = frozenset(
    {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }
)
"""Kernels that torch picked because the operands were fp32, under alignment conditions that a 16-bit type does not
meet. ``kernels`` casts such calls before the kernel is chosen; a graph that has them already keeps them in fp32."""

_SUMS = """sum mean prod cumsum cumprod logsumexp logcumsumexp var std var_mean std_mean norm linalg_vector_norm
linalg_matrix_norm nansum nanmean trace dot vdot dist cdist _cdist_forward _cdist_backward pdist
_pdist_forward renorm quantile nanquantile histc"""
_NORMS = """softmax _softmax log_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data layer_norm
native_layer_norm native_layer_norm_backward group_norm native_group_norm native_group_norm_backward
rms_norm _fused_rms_norm _fused_rms_norm_backward batch_norm native_batch_norm native_batch_norm_backward
_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward
instance_norm cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward
cosine_similarity _weight_norm_interface"""
_LOSSES = """nll_loss nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss
mse_loss_backward l1_loss smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward kl_div
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss
cross_entropy_loss multi_margin_loss multilabel_margin_loss_forward poisson_nll_loss
cosine_embedding_loss _ctc_loss _ctc_loss_backward ctc_loss triplet_margin_loss margin_ranking_loss
hinge_embedding_loss"""
_RANGE = """exp exp2 expm1 log log2 log10 log1p pow rsqrt reciprocal softplus softplus_backward tan sinh cosh acos
asin acosh atanh erfinv erfc lgamma digamma polygamma special_zeta i0"""
_LINALG = """_fft_r2c _fft_c2r _fft_c2c fft_rfft fft_irfft fft_fft fft_ifft linalg_inv inverse linalg_solve
_linalg_solve_ex linalg_qr linalg_eigh _linalg_eigh linalg_svd _linalg_svd linalg_cholesky
linalg_cholesky_ex linalg_det _linalg_det linalg_slogdet _linalg_slogdet linalg_lstsq linalg_matrix_exp
matrix_exp linalg_inv_ex linalg_lu_factor_ex linalg_eig linalg_eigvals linalg_pinv linalg_lu lu_unpack
triangular_solve linalg_solve_triangular cholesky_solve logdet"""
_SCATTERS = """embedding_dense_backward embedding_bag _embedding_bag scatter_add index_add index_put index_put_
_index_put_impl_ _unsafe_index_put scatter_reduce index_reduce segment_reduce bincount
max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward avg_pool2d_backward
_unsafe_masked_index_put_accumulate"""
_COORDINATES = """grid_sampler grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward
affine_grid_generator upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_bilinear2d_backward
upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""

FP32_GROUPS: dict[str, str] = {
    "sums many terms": _SUMS,
    "normalises by statistics": _NORMS,
    "loss": _LOSSES,
    "range or steepness": _RANGE,
    "fft or factorisation": _LINALG,
    "accumulating scatter": _SCATTERS,
    "coordinates": _COORDINATES,
}
"""FP32 ops by reason."""

FP32_OPS: dict[str, str] = {name: reason for reason, names in FP32_GROUPS.items() for name in names.split()}

EXACT_OPS = frozenset(
    """view reshape _unsafe_view permute transpose t unsqueeze squeeze expand alias detach slice select clone
contiguous split split_with_sizes chunk unbind as_strided diagonal unfold flip roll cat stack gather index
_unsafe_index index_select embedding take masked_select masked_scatter constant_pad_nd reflection_pad1d
reflection_pad2d replication_pad1d replication_pad2d slice_scatter select_scatter scatter repeat tile max min
amax amin argmax argmin sort topk kthvalue mode median maximum minimum eq ne lt le gt ge isnan isinf isfinite
where max_pool2d max_pool2d_with_indices _low_memory_max_pool_with_offsets empty full zeros ones empty_like
full_like zeros_like ones_like copy lift_fresh_copy convert_element_type _to_copy getitem tril triu relu
threshold neg abs sign logical_not masked_fill broadcast_in_dim searchsorted bucketize""".split()
)

RANKING_OPS = frozenset(
    "argmax argmin sort argsort topk kthvalue mode searchsorted bucketize eq ne lt le gt ge isclose".split()
)
"""Ops that compare values: a rounding in front of them can change which element wins."""

STATISTICS = frozenset(FP32_OPS) - frozenset(_RANGE.split())
"""Ops that read many elements into one: they read a value unrounded even where a low copy of it exists."""

_registered: dict[str, OpClass] = {}


def register_op(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | Callable[..., Any] | str,
    op_class: str,
) -> None:
    """Say how a custom operator is treated: ``"low"``, ``"fp32"`` or ``"follow"``.

    ``low`` narrows all its fp32 tensor arguments and widens its low results again. ``op`` is the operator
    (``torch.ops.mylib.op`` or the object ``torch.library.custom_op`` returned) or its name ``"mylib::op"``.
    Unregistered custom operators see exactly the dtypes they were traced with.
    """
    classes = {"low": OpClass.LOW, "fp32": OpClass.FP32, "follow": OpClass.FOLLOW}
    if op_class not in classes:
        raise ValueError(f"op_class must be one of {sorted(classes)}, got {op_class!r}.")
    _registered[_qualified_name(op)] = classes[op_class]


def _qualified_name(op: Any) -> str:
    name: Any
    if isinstance(op, str):
        name = op
    elif isinstance(op, torch._ops.OpOverload):
        name = op._schema.name
    else:
        name = getattr(op, "_qualified_op_name", None) or getattr(op, "_qualname", "")
    if "::" not in name:
        raise TypeError(f"register_op needs an operator or a name such as 'mylib::op', got {op!r}.")
    return str(name).removeprefix("aten::")


def registered_ops() -> tuple[tuple[str, str], ...]:
    """What ``register_op`` was told, in a stable order (part of the compile cache key)."""
    return tuple(sorted((name, cls.value) for name, cls in _registered.items()))


def classify(target: Any) -> OpClass:
    """The class of an operator, by what it is in the (decomposed) graph."""
    name = packet_name(target)
    if name in _registered:
        return _registered[name]
    if name in LOW_OPS:
        return OpClass.LOW
    if name in FP32_OPS:
        return OpClass.FP32
    if name in EXACT_OPS:
        return OpClass.EXACT
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return OpClass.FOLLOW
    return OpClass.FOLLOW if name in _FOLLOW else OpClass.OPAQUE


# Elementwise in the mathematical sense, though torch does not tag them so; pooling averages a few neighbours.
_FOLLOW = frozenset(
    """fma native_dropout dropout bernoulli avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d glu glu_backward prelu
gelu_backward silu_backward tanh_backward sigmoid_backward native_dropout_backward threshold_backward
leaky_relu_backward elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward mish_backward""".split()
)


def roles_of(target: Any) -> Roles | None:
    """The low arguments and results of a LOW operator of the table, or None for one that takes all of them."""
    return LOW_OPS.get(packet_name(target))
