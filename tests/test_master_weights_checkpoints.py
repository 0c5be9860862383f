"""Masters are what is saved under the model's own keys, and a resumed run is the uninterrupted one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import mpcompile
from tests.master_weights_tools import (
    BF16,
    FP16,
    OPTIMIZERS,
    Net,
    Tied,
    assert_follow,
    assert_fp32_masters,
    assert_same,
    backward,
    batch,
    both_dtypes,
    every_optimizer,
    everything,
    fp32_twin,
    give_gradients,
    masters_of,
    train,
    values,
)
from tests.test_programs import mixprec


def test_the_state_dict_holds_the_masters_under_the_same_keys() -> None:
    model = Net().bfloat16()
    keys = list(model.state_dict())
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    state = model.state_dict()
    assert list(state) == keys
    assert_fp32_masters(state, masters)
    assert any(bool((value != value.bfloat16().float()).any()) for value in state.values())


def test_a_compiled_model_and_a_parent_have_them_under_their_own_keys() -> None:
    model = Net().bfloat16()
    compiled = mixprec(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    masters = mpcompile.master_weights(compiled, optimizer)
    train(compiled, optimizer, range(2))
    parent = nn.ModuleDict({"part": model})
    for prefix, state in (("_orig_mod.", compiled.state_dict()), ("part.", parent.state_dict())):
        assert_same(dict(state), {prefix + name: value for name, value in masters.items()})


def test_buffers_are_saved_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).bfloat16()
    masters_of(model)
    state = model.state_dict()
    assert state["1.running_mean"].dtype is BF16
    assert state["1.running_mean"].data_ptr() == model[1].running_mean.data_ptr()
    assert state["1.num_batches_tracked"].dtype is torch.int64


def test_both_names_of_a_tied_weight_are_saved_as_its_master() -> None:
    model = Tied().bfloat16()
    optimizer, masters = masters_of(model)
    model(batch(BF16, features=4)).float().square().mean().backward()
    optimizer.step()
    master = masters["first.weight"]
    assert_same(dict(model.state_dict()), {"first.weight": master, "second.weight": master})


def test_loading_restores_the_masters_exactly() -> None:
    model, fresh = Net().bfloat16(), Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(3))
    state = copy.deepcopy(model.state_dict())
    _, masters = masters_of(fresh)
    fresh.load_state_dict(state)
    assert_same(dict(masters), dict(state))
    assert_same(values(fresh.parameters()), values(model.parameters()))
    assert_same(fresh.state_dict(), state)


@both_dtypes
def test_a_16_bit_state_dict_becomes_the_masters(dtype: torch.dtype) -> None:
    model, other = Net().to(dtype), Net().to(dtype)
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2), dtype)
    model.load_state_dict(other.state_dict())
    assert_same(dict(masters), {name: parameter.detach().float() for name, parameter in other.named_parameters()})
    assert_same(values(model.parameters()), values(other.parameters()))


def test_loading_a_part_leaves_the_rest() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(dict(masters))
    new = torch.rand(4) / 3
    model.load_state_dict({"body.2.bias": new}, strict=False)
    assert_same(dict(masters), {**before, "body.2.bias": new})


def test_an_optimizer_state_dict_is_restored_without_rounding() -> None:
    models = [Net().bfloat16() for _ in range(2)]
    optimizer, fresh = (masters_of(model, OPTIMIZERS["AdamW"])[0] for model in models)
    train(models[0], optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    fresh.load_state_dict(state)
    assert_same(fresh.state_dict(), state)


def test_the_state_of_an_optimizer_without_masters_is_continued_in_fp32() -> None:
    plain, model = Net().bfloat16(), Net().bfloat16()
    without = AdamW(plain.parameters(), lr=1e-3)
    train(plain, without, range(2))
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    saved = without.state_dict()
    optimizer.load_state_dict(copy.deepcopy(saved))
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = OPTIMIZERS["AdamW"](twin)
    reference.load_state_dict(copy.deepcopy(saved))
    backward(model, BF16, (2,))
    give_gradients(twin, parameters)
    optimizer.step()
    reference.step()
    assert_follow(masters, parameters, twin)
    assert_same(optimizer.state_dict(), reference.state_dict())


def save(path: Path, model: nn.Module, optimizer: Optimizer, compiled: Any) -> None:
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "runtime": mpcompile.runtime(compiled).state_dict(),
        },
        path,
    )


def load(path: Path, model: nn.Module, optimizer: Optimizer, compiled: Any) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    mpcompile.runtime(compiled).load_state_dict(saved["runtime"])


def assert_resumes(make: Callable[..., Optimizer], path: Path, *, anew: bool, **options: Any) -> dict[str, Any]:
    """3 + 3 steps end alike in one run and in one that starts from a file in the middle; return the runtime's state.

    ``anew``: compile the second model, which otherwise runs the code of the first.
    """
    dtype = {"fp16": FP16, "bf16": BF16}[options["dtype"]]
    model = Net().to(dtype)
    optimizer, _ = masters_of(model, make)
    compiled = mixprec(model, **options)
    train(compiled, optimizer, range(3), dtype)
    save(path, model, optimizer, compiled)
    train(compiled, optimizer, range(3, 6), dtype)

    if anew:
        torch._dynamo.reset()
    fresh = Net().to(dtype)
    continued, _ = masters_of(fresh, make)
    again = mixprec(fresh, **options)
    load(path, fresh, continued, again)
    train(again, continued, range(3, 6), dtype)
    assert_same(everything(fresh, continued), everything(model, optimizer))
    state = mpcompile.runtime(compiled).state_dict()
    assert mpcompile.runtime(again).state_dict() == state
    return state


@every_optimizer
def test_a_resumed_run_is_the_uninterrupted_one(make: Callable[..., Optimizer], tmp_path: Path) -> None:
    # The loss scale doubles with every second step: the one that is saved is not what a new run begins with.
    scale = {"init_scale": 16.0, "growth_interval": 2}
    state = assert_resumes(make, tmp_path / "checkpoint.pt", anew=False, dtype="fp16", loss_scale=scale)
    assert state["scale"] == 128.0


@both_dtypes
def test_a_resumed_run_that_compiles_anew_is_the_uninterrupted_one(dtype: torch.dtype, tmp_path: Path) -> None:
    make, name = OPTIMIZERS["AdamW"], {FP16: "fp16", BF16: "bf16"}[dtype]
    assert_resumes(make, tmp_path / "checkpoint.pt", anew=True, dtype=name)


def test_a_whole_model_can_still_be_saved(tmp_path: Path) -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(2))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(values(loaded.parameters()), values(model.parameters()))
