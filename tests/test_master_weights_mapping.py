"""The mapping that master_weights returns: what it holds, what it shows, and that it keeps nothing alive."""

import gc
import weakref

import pytest
from torch.optim import SGD

import mpcompile
from tests.master_weights_tools import FP16, Mixed, Net, assert_same, masters_of, train


def test_model_and_optimizer_are_freed_when_they_are_let_go() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    model.state_dict()
    gone = [weakref.ref(each) for each in (model, optimizer, masters)]
    gc.collect()
    gc.disable()  # so that a cycle of references would keep them
    try:
        del model, optimizer, masters
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


def test_it_is_a_mapping_of_the_trained_16_bit_parameters() -> None:
    model = Mixed(FP16)
    optimizer = SGD(reversed(list(model.parameters())), lr=0.1)
    masters = mpcompile.master_weights(model, optimizer)
    names = ["second.bias", "second.weight", "first.bias", "first.weight"]
    assert list(masters) == list(masters.keys()) == names
    assert len(masters) == 4
    assert ("first.weight" in masters, "norm.weight" in masters) == (True, False)
    assert masters.get("norm.weight", 5) == 5
    with pytest.raises(KeyError, match=r"norm\.weight"):
        masters["norm.weight"]
    parameters = dict(model.named_parameters())
    assert_same(dict(masters), {name: parameters[name].detach().float() for name in names})


def test_it_shows_the_masters_of_now_and_not_for_training() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    held = masters["body.0.bias"]
    before = held.clone()
    train(model, optimizer, range(2))
    assert_same(held, masters["body.0.bias"])
    assert bool((held != before).all())
    assert not held.requires_grad
