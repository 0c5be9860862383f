"""Two processes skip together and keep equal parameters; DDP may wrap the compiled model or be compiled with it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import mpcompile
from tests.distributed_worker import BAD, ONE_WITHOUT, STEPS, WAYS, make_batch, make_loss, make_model
from tests.helpers import relative_error
from tests.test_programs import in_fp64
from tests.test_programs_fp16 import BOUND, fp16, set_scale

Seen = dict[str, list[dict[str, Any]]]
"""What a process saw: for every way to train, for every step."""

WITH_DDP = [how for how in WAYS if "without" not in how]
TOGETHER = [*WITH_DDP, "without DDP"]
APART = [how for how in WAYS if how not in TOGETHER]
GOOD_STEPS = [step for step in range(STEPS) if step != BAD]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(rank: int, port: int) -> "subprocess.Popen[str]":
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("distributed_worker.py"))],
        env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def both() -> tuple[Seen, Seen]:
    """What two processes saw, which train in every way one after the other."""
    port = free_port()
    processes = [start(rank, port) for rank in range(2)]
    try:
        answers = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in answers)
    return first, second


def of_steps(seen: list[dict[str, Any]], name: str) -> list[Any]:
    return [step[name] for step in seen]


@pytest.mark.parametrize("how", TOGETHER)
def test_one_process_overflows_and_both_skip(how: str, both: tuple[Seen, Seen]) -> None:
    for seen in both:
        assert of_steps(seen[how], "skipped") == [step == BAD for step in range(STEPS)]
        assert of_steps(seen[how], "moved") == [step != BAD for step in range(STEPS)]
        assert of_steps(seen[how], "scale") == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


@pytest.mark.parametrize("how", WITH_DDP)
def test_parameters_stay_equal_to_the_bit_under_ddp(how: str, both: tuple[Seen, Seen]) -> None:
    first, second = both
    assert of_steps(first[how], "parameters") == of_steps(second[how], "parameters")
    assert len(set(of_steps(first[how], "parameters"))) == STEPS - 1


@pytest.mark.parametrize("how", WITH_DDP)
def test_ddp_averages_the_gradients_of_fp64(how: str, both: tuple[Seen, Seen]) -> None:
    exact = in_fp64(make_model())
    passes = 2 if "accumulated" in how else 1
    for rank in range(2):
        (make_loss(exact(make_batch(0, rank).double())) * passes / 2).backward()
    for seen in both:
        gradients = map(torch.tensor, seen[how][0]["gradients"])
        for found, parameter in zip(gradients, exact.parameters(), strict=True):
            assert relative_error(found, parameter.grad) < BOUND


@pytest.mark.parametrize("how", WITH_DDP)
def test_what_overflowed_is_named_from_the_model_that_was_compiled(how: str, both: tuple[Seen, Seen]) -> None:
    for seen in both:
        assert of_steps([seen[how][step] for step in GOOD_STEPS], "overflowed") == [[], [], []]
    prefix = "module." if "outside" in how else ""
    # DDP averages before the gradients are judged, so an infinity is everywhere, unless someone cleaned it away.
    expected = [f"{prefix}{name}" for name in ("first.weight", "first.bias", "last.weight")]
    assert set(expected) <= set(both[1][how][BAD]["overflowed"])
    if "cleaned" in how:
        assert both[0][how][BAD]["overflowed"] == []
    else:
        assert set(expected) <= set(both[0][how][BAD]["overflowed"])


def test_cleaning_gradients_hides_an_overflow_from_nobody(both: tuple[Seen, Seen]) -> None:
    first, second = (seen["compiled inside DDP, cleaned"] for seen in both)
    assert first[BAD]["skipped"] == second[BAD]["skipped"] is True
    # The first process had nothing to see: its own backward was clean, and so is now what DDP gave it.
    assert (first[BAD]["finite"], first[BAD]["overflowed"]) == (True, [])
    assert (second[BAD]["finite"], second[BAD]["overflowed"][0]) == (True, "first.weight")


def test_flags_are_shared_where_gradients_are_not(both: tuple[Seen, Seen]) -> None:
    first, second = (seen["without DDP"] for seen in both)
    assert (first[BAD]["finite"], first[BAD]["skipped"], first[BAD]["overflowed"]) == (True, True, [])
    assert "first.weight" in second[BAD]["overflowed"]


@pytest.mark.parametrize("how", APART)
def test_a_process_may_decide_alone(how: str, both: tuple[Seen, Seen]) -> None:
    first, second = (seen[how] for seen in both)
    assert of_steps(first, "skipped") == [False] * STEPS
    assert of_steps(first, "scale") == [2.0**16] * STEPS
    assert of_steps(second, "skipped") == [step == BAD for step in range(STEPS)]
    assert of_steps(second, "scale") == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_process_without_gradients_takes_part_in_the_decision(both: tuple[Seen, Seen]) -> None:
    # Its own step would change nothing; but the others ask it, and its scale is to stay theirs.
    for seen in both:
        assert [step.get("error") for step in seen[ONE_WITHOUT]] == [None] * STEPS
        assert of_steps(seen[ONE_WITHOUT], "moved") == [step != BAD for step in range(STEPS)]
        assert of_steps(seen[ONE_WITHOUT], "scale") == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


class Deep(nn.Module):
    """Weights of 1 MB each, which is a bucket of DDP's for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, which needs no port."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_model_that_ddp_splits_into_several_graphs() -> None:
    model, x = Deep(), torch.randn(4, 512)
    exact = in_fp64(model)
    exact(x.double()).square().sum().backward()
    compiled = fp16(DDP(model, bucket_cap_mb=1))
    # With 2^4 a few of the many elements are subnormal in fp16, so that the bits differ and the bound holds.
    for scale in (2.0**4, 2.0**12):
        model.zero_grad()
        set_scale(compiled, scale)
        compiled(x).square().sum().backward()
        for parameter, truth in zip(model.parameters(), exact.parameters(), strict=True):
            assert relative_error(parameter.grad, truth.grad) < BOUND
    assert len(mpcompile.reports(compiled)) > 1


@pytest.mark.usefixtures("process_group")
def test_overflow_in_a_model_that_ddp_splits_is_skipped_and_named() -> None:
    model, x = Deep(), torch.randn(4, 512)
    compiled = fp16(DDP(model, bucket_cap_mb=1))
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=1e-3), mpcompile.runtime(compiled)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (compiled(x).sum() * 1e8).backward()
    optimizer.step()
    assert len(mpcompile.reports(compiled)) > 1
    assert runtime.last_step_skipped
    assert runtime.scale == 2.0**15
    # The last bias is summed in fp32, where 1e8 * 2^16 is no overflow; an infinity spoils all that is below it.
    names = [f"module.{name}" for name, _ in model.named_parameters()]
    assert runtime.overflowed == tuple(names[:-1])
    assert all(map(torch.equal, before, model.parameters()))
