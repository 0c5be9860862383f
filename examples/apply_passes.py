"""Apply the passes by hand to an exported graph, read what they changed, and measure the error.

The passes need neither torch.compile nor training: any ATen graph will do, here one from
torch.export. The second run keeps the module `head` in fp32 by a rule.

    python examples/apply_passes.py
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.export import ExportedProgram

from mpcompile.passes import PassResult, Policy, run_passes

SHOWN_CHANGES = 5
"""Per pass."""


class Classifier(nn.Module):
    """A norm, a hidden layer, a gate on it, and class probabilities."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.norm(x)).relu()
        x = x * self.gate(x).sigmoid()
        return self.head(x).softmax(-1)


def rewrite(
    model: nn.Module, inputs: tuple[Tensor, ...], policy: Policy
) -> tuple[ExportedProgram, Sequence[PassResult]]:
    """Export the model and run the passes on its graph, in place."""
    program = torch.export.export(model, inputs).run_decompositions()
    return program, run_passes(program.graph_module, policy)


def show(result: PassResult, console: Console) -> None:
    """Print how much a pass changed, and its first changes."""
    console.print(f"[bold]{result.name}[/bold] changes: {len(result.changes)}")
    if not result.changed:
        return
    table = Table()
    for heading in ("node", "op", "before", "after", "reason"):
        table.add_column(heading, overflow="fold")
    for change in result.changes[:SHOWN_CHANGES]:
        table.add_row(change.node, change.op, change.before, change.after, change.reason)
    console.print(table)


def largest_error(output: Tensor, expected: Tensor) -> str:
    return f"{(output.double() - expected.double()).abs().max().item():.1e}"


def main() -> None:
    # torch.export trips over a deprecation of its own here.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    console = Console()
    torch.manual_seed(0)
    model, inputs = Classifier().eval(), (torch.randn(32, 64),)
    low, results = rewrite(model, inputs, Policy(dtype=torch.bfloat16))
    ruled, _ = rewrite(model, inputs, Policy(dtype=torch.bfloat16, fp32=("head",)))

    for result in results:
        show(result, console)
    console.print("The graph after the passes:", style="bold")
    print(low.graph_module.code)

    with torch.no_grad():
        fp32 = model(*inputs)
        fp64 = copy.deepcopy(model).double()(*(x.double() for x in inputs))
        outputs = {
            "fp32": fp32,
            "bf16": low.module()(*inputs),
            "bf16, `head` in fp32": ruled.module()(*inputs),
        }
    errors = Table("", "from fp32", "from fp64", title="Largest absolute error of the output")
    for name, output in outputs.items():
        errors.add_row(name, largest_error(output, fp32), largest_error(output, fp64))
    console.print(errors)


if __name__ == "__main__":
    main()
