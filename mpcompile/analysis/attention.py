"""Attention kernels by their formula, in any precision, and differentiable: forward kernels and backward kernels.

Formulas: Dao et al., FlashAttention (2022), appendix B; the statistics are the natural logarithm of the sum of exps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from mpcompile.passes.graph import arguments, packet_name

_FORWARD = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
_BACKWARD = frozenset(f"{name}_backward" for name in _FORWARD)


def is_attention(node: fx.Node) -> bool:
    """Whether a node is an attention kernel without dropout, forward or backward."""
    if node.op != "call_function" or packet_name(node.target) not in _FORWARD | _BACKWARD:
        return False
    return not dict(arguments(node)).get("dropout_p", 0.0)


def attend(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What the kernel ``node`` returns for these arguments, computed in their precision.

    Queries, keys and values are [batch, heads, length, width]. Results that only carry random state are None.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    mask = given.get("attn_mask", given.get("attn_bias"))
    if packet_name(node.target) in _FORWARD:
        results = _forward(given["query"], given["key"], given["value"], mask, given)
    else:
        gradient = given["grad_out" if "grad_out" in given else "grad_out_"]
        results = _backward(gradient, given["query"], given["key"], given["value"], mask, given)
    return results + (None,) * (len(schema.returns) - len(results))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, given: dict[str, Any]) -> Tensor:
    scores = query @ key.transpose(-2, -1) * _scale(query, given)
    if given.get("is_causal"):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def _scale(query: Tensor, given: dict[str, Any]) -> float:
    scale = given.get("scale")
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]) -> tuple[Any, ...]:
    key, value = _shared_heads(query, key), _shared_heads(query, value)
    scores = _scores(query, key, mask, given)
    statistics = torch.logsumexp(scores, dim=-1)
    return _weights(scores, statistics) @ value, statistics


def _weights(scores: Tensor, statistics: Tensor) -> Tensor:
    """Softmax by its statistics; a row that is masked everywhere attends to nothing."""
    nothing = statistics == -math.inf
    return torch.exp(scores - statistics.masked_fill(nothing, math.inf).unsqueeze(-1))


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
) -> tuple[Any, ...]:
    wide_key, wide_value = _shared_heads(query, key), _shared_heads(query, value)
    statistics = given["logsumexp"][..., : query.shape[-2]].reshape(query.shape[:-1])  # some kernels pad the length
    weights = _weights(_scores(query, wide_key, mask, given), statistics)
    through_weights = gradient @ wide_value.transpose(-2, -1)
    through_scores = weights * (through_weights - (gradient * given["out"]).sum(-1, keepdim=True))
    scale = _scale(query, given)
    of_query = through_scores @ wide_key * scale
    of_key = through_scores.transpose(-2, -1) @ query * scale
    of_value = weights.transpose(-2, -1) @ gradient
    results = (of_query, _summed_heads(of_key, key), _summed_heads(of_value, value))
    if mask is not None and given.get("grad_input_mask", (False,))[-1]:
        return (*results, through_scores.sum_to_size(mask.shape))
    return results


def _shared_heads(query: Tensor, other: Tensor) -> Tensor:
    """Keys or values of grouped queries, once for each query head."""
    times = query.shape[-3] // other.shape[-3]
    return other.repeat_interleave(times, dim=-3) if times > 1 else other


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    times = gradient.shape[-3] // like.shape[-3]
    return gradient.unflatten(-3, (like.shape[-3], times)).sum(-3) if times > 1 else gradient
