"""What a training comparison looks like: a table in the terminal and a chart in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from stdlib_text import Batch
from training import Trainee


def tabulate(trainees: Sequence[Trainee], held_out: Batch, last: int) -> Table:
    """Compare losses and times; the first trainee is the reference."""
    table = Table(title="Same weights, same batches, all compiled with Inductor")
    table.add_column("")
    for heading in (
        f"loss, last {last} steps",
        "loss, held out",
        "held out - fp32",
        "median step",
        "compiling",
    ):
        table.add_column(heading, justify="right")
    reference = trainees[0].held_out_loss(held_out)
    for trainee in trainees:
        loss = trainee.held_out_loss(held_out)
        table.add_row(
            trainee.name,
            f"{trainee.final_loss(last):.4f}",
            f"{loss:.4f}",
            f"{loss - reference:+.4f}" if trainee is not trainees[0] else "",
            f"{trainee.step_time() * 1e3:.1f} ms",
            f"{trainee.seconds[0]:.1f} s",
        )
    return table


def draw(trainees: Sequence[Trainee], path: Path) -> None:
    """Save the loss curves, and below them the differences from the first trainee's curve."""
    import matplotlib  # here, so that the training runs without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reference = trainees[0].losses
    figure, (curves, differences) = pyplot.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    for index, trainee in enumerate(trainees):
        style = {"color": f"C{index}", "linestyle": ("-", ":", "--")[index % 3]}
        curves.plot(trainee.losses, label=trainee.name, **style)
        change = [loss - other for loss, other in zip(trainee.losses, reference, strict=True)]
        differences.plot(change, **style)
    curves.set(ylabel="training loss (nats per byte)")
    curves.legend()
    differences.set(xlabel="step", ylabel="loss - fp32")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
