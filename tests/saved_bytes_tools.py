"""What a compiled model really keeps for backward."""

from collections.abc import Sequence

from torch import Tensor, fx, nn

from mpcompile.measurement import kept_storages
from mpcompile.passes.saved_values import predict_partition, size


def bytes_saved(compiled: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Bytes that one call keeps for backward: each storage once, without parameters, buffers and inputs."""
    known = (*compiled.parameters(), *compiled.buffers(), *inputs)
    kept, result = kept_storages(lambda: compiled(*inputs), known)
    assert result.requires_grad  # what is kept is alive until here
    return sum(kept.values())


def bytes_predicted(graph: fx.Graph) -> int:
    """Bytes that ``predict_partition`` says are kept."""
    return sum(size(node) for node in predict_partition(graph).saved if node.op == "call_function")
