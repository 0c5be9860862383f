"""What every test starts from: seeded, one thread, nothing compiled before, the same graphs on every CPU."""

from collections.abc import Iterator

import pytest
import torch

from mpcompile import joint_pass
from mpcompile.passes import op_classes


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    # Not the monkeypatch fixture: a test that undoes its own patches would undo this one as well.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_classes, "_registered", {})
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _no_native_low_types() -> Iterator[None]:
    # Where products are emulated they leave in fp32: a CPU with bf16 instructions would make other graphs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_pass, "has_native_bf16", lambda _: False)
        patch.setattr(joint_pass, "has_native_fp16", lambda _: False)
        yield
