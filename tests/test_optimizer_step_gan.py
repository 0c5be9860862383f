"""Of two optimizers whose losses pass through both models, the one whose gradients overflowed skips its step."""

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer_step_tools import HUGE, SCALE, everything, training
from tests.test_programs import mixprec


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(2, 3)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.make(noise))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(x)


class Gan:
    """A generator and a discriminator, each with an optimizer; the generator's loss passes through both.

    ``one_graph``: compiled together for that loss, instead of one after the other.
    """

    def __init__(self, one_graph: bool) -> None:
        self.generator, self.discriminator = training(model=Generator()), training(model=Discriminator())
        model, judge = self.generator.model, self.discriminator.model
        self._fool = (
            mixprec(lambda z: judge(model(z)), dtype="fp16", loss_scale={"init_scale": SCALE})
            if one_graph
            else lambda z: self.discriminator.compiled(self.generator.compiled(z))
        )

    def run(self, script: str) -> tuple[bool, bool]:
        """Act as ``script`` says, and return whether generator and discriminator are changed.

        For generator and discriminator, ``G`` and ``D``: ``zero`` clears the gradients, ``loss`` runs backward,
        ``HUGE`` runs one that overflows, ``step`` steps.
        """
        optimizers = [self.generator.optimizer, self.discriminator.optimizer]
        before = list(map(everything, optimizers))
        for action in script.split():
            optimizer = optimizers["GD".index(action[0])]
            if action[1:] == "zero":
                optimizer.zero_grad()
            elif action[1:] == "step":
                optimizer.step()
            else:
                output = (
                    self._fool(torch.ones(4, 2)) if action[0] == "G" else self.discriminator.compiled(torch.ones(4, 3))
                )
                (output.square().mean() * {"loss": 1.0, "HUGE": HUGE}[action[1:]]).backward()
        after = list(map(everything, optimizers))
        return before[0] != after[0], before[1] != after[1]

    def check(self, *scripts: tuple[str, bool, bool]) -> None:
        """Run each script in turn; with it, whether it changes the generator and the discriminator."""
        for script, *changed in scripts:
            assert [*self.run(script)] == changed, script


in_one_graph_or_two = pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "two graphs"])


@in_one_graph_or_two
def test_gan_only_the_model_that_overflowed_is_skipped(one_graph: bool) -> None:
    gan = Gan(one_graph)
    gan.check(
        ("Gzero Gloss Gstep Dzero Dloss Dstep", True, True),
        ("Gzero Gloss Gstep Dzero DHUGE Dstep", True, False),
        ("Dzero DHUGE Dstep Gzero Gloss Gstep", True, False),
        ("Dzero Gzero DHUGE Dstep Gloss Gstep", True, False),
        ("Dzero Dloss Dstep Gzero GHUGE Gstep", False, True),
        # Without zero_grad the generator's infinity is in the discriminator's gradient.
        ("Dstep Gzero Dzero", False, False),
        ("Gzero Gloss Gstep Dzero Dloss Dstep", True, True),
    )


@in_one_graph_or_two
def test_gan_what_the_generators_loss_left_in_the_discriminator_does_not_count_once_cleared(one_graph: bool) -> None:
    gan = Gan(one_graph)
    gan.check(
        ("Gzero GHUGE Gstep Dzero Dloss Dstep", False, True),
        ("Gzero GHUGE Dzero Dloss Dstep Gstep", False, True),
        ("Gzero GHUGE Dzero Gstep Dloss Dstep", False, True),
        ("Gzero GHUGE Gstep Gzero Dzero Gloss Gstep Dzero Dloss Dstep", True, True),
    )


@in_one_graph_or_two
def test_gan_it_counts_where_it_was_not_cleared_even_if_it_is_hidden(one_graph: bool) -> None:
    gan = Gan(one_graph)
    # The last one was cleared, but before the overflow.
    for script in ("GHUGE Gstep Dloss", "GHUGE Gstep Gzero Gloss", "Gzero Gloss Dzero Dloss GHUGE"):
        gan.run("Gzero Dzero")
        gan.run(script)
        for gradient in gan.discriminator.gradients:
            gradient.nan_to_num_(0, 0, 0)
        assert gan.run("Dstep") == (False, False), script


def test_gan_an_overflow_in_the_generator_alone_leaves_the_discriminator_to_step() -> None:
    gan = Gan(one_graph=False)
    made = gan.generator.compiled(torch.ones(4, 2))
    made.register_hook(lambda gradient: gradient * HUGE)
    gan.discriminator.compiled(made).square().mean().backward()
    assert gan.run("Gstep Dstep") == (False, True)
    assert [t.runtime.scale for t in (gan.generator, gan.discriminator)] == [SCALE / 2, SCALE]
