"""What a compiled model really keeps for backward."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from mpcompile.passes.saved_values import predict_partition, size


def bytes_saved(compiled: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Bytes that one call keeps for backward: each storage once, without parameters, buffers and inputs."""
    known = {v.untyped_storage().data_ptr() for v in (*compiled.parameters(), *compiled.buffers(), *inputs)}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = compiled(*inputs)
    assert result.requires_grad  # what is kept is alive until here
    return sum(kept.values())


def bytes_predicted(graph: fx.Graph) -> int:
    """Bytes that ``predict_partition`` says are kept."""
    return sum(size(node) for node in predict_partition(graph).saved if node.op == "call_function")
