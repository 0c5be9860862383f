"""What every test starts from: seeded, one thread, nothing compiled before."""

from collections.abc import Iterator

import pytest
import torch

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
