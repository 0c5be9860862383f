"""recast_weights: which low copies of parameters backward makes anew."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from mpcompile.passes import Policy, run_passes
from mpcompile.passes.cost_model import PRESETS, rows_to_recast
from mpcompile.passes.graph import is_cast, viewed
from tests.helpers import calls, joint

DEFAULT = PRESETS["default"]


def recast(gm: fx.GraphModule) -> Iterator[str]:
    """The names of what is cast anew in backward."""
    for node in calls(gm):
        if is_cast(node) and node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE:
            yield viewed(node.all_input_nodes[0]).name


@pytest.mark.parametrize(("rows", "pays"), [(128, True), (1000, True), (127, False), (2, False)])
def test_parameters_are_cast_anew_for_tall_matmuls(rows: int, pays: bool) -> None:
    gm = joint(nn.Linear(4, 5), torch.randn(rows, 4, requires_grad=True))
    run_passes(gm, Policy())
    assert set(recast(gm)) == ({"primals_1", "primals_2"} if pays else set())


def test_views_between_a_copy_and_its_product_are_made_anew_too() -> None:
    gm = joint(nn.Linear(4, 5, bias=False), torch.randn(200, 4, requires_grad=True))
    run_passes(gm, Policy())
    (copy,) = [node for node in calls(gm) if is_cast(node) and "recompute" in node.meta]
    views = [user for user in copy.users if viewed(user) is not user]
    assert views
    assert any(user.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE for user in views)


def test_a_dynamic_number_of_rows_counts_as_many() -> None:
    gm = joint(nn.Linear(4, 5), torch.randn(3, 4, requires_grad=True), dynamic=True)
    run_passes(gm, Policy())
    assert len(set(recast(gm))) == 2


def saved(gm: fx.GraphModule) -> list[str]:
    """The names of what is cast and then saved for backward, whatever a partitioner prefers."""
    marked = [node for node in calls(gm) if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    return [viewed(node.all_input_nodes[0]).name for node in marked if is_cast(node)]


def test_convolutions_keep_the_copies_of_their_weights() -> None:
    gm = joint(nn.Conv1d(4, 5, 3, bias=False), torch.randn(200, 4, 9))  # no gradient of the input reads the weight
    run_passes(gm, Policy())
    assert list(recast(gm)) == []
    assert saved(gm) == ["primals_1"]


def test_rows_follow_from_the_prices() -> None:
    # 6 bytes x operations per byte / (6 x rows) = 2 / 16
    assert rows_to_recast("cpu", DEFAULT) == 16 * 8
    assert rows_to_recast("cuda", DEFAULT) == rows_to_recast("xpu", DEFAULT) == 200 * 8
    assert rows_to_recast("cpu", dataclasses.replace(DEFAULT, held=4.0)) == 16 * 2
