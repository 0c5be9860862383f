"""What each process of ``test_distributed`` does: train a small model in several ways, and print what it saw as JSON.

Both processes have equal weights. In the second of four steps the gradients of the second process overflow.
"""

import hashlib
import json
import os
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import mpcompile

OPTIONS = {"dtype": "fp16", "compiler": "aot_eager"}
STEPS, BAD = 4, 1
ONE_WITHOUT = "without DDP, one without gradients"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def make_batch(step: int, rank: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def make_loss(output: Tensor) -> Tensor:
    return output.square().mean()


def compile_as(how: str, model: Net) -> tuple[Any, mpcompile.Runtime]:
    """The model to call, compiled and maybe distributed, and its runtime."""
    if "inside" in how:
        model.compile(backend="mixprec", options=OPTIONS)
        return DDP(model), mpcompile.runtime(model)
    compiled = torch.compile(DDP(model) if "outside" in how else model, backend="mixprec", options=OPTIONS)
    return compiled, mpcompile.runtime(compiled)


def digest(model: nn.Module) -> str:
    """Changes with every bit of the parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def backward(how: str, compiled: Any, step: int, rank: int) -> None:
    if step == BAD and rank == 0 and how == ONE_WITHOUT:
        return
    factor = 1e9 if step == BAD and rank == 1 else 1.0
    if "accumulated" not in how:
        (make_loss(compiled(make_batch(step, rank))) * factor).backward()
        return
    with compiled.no_sync():
        (make_loss(compiled(make_batch(step, rank))) * factor).backward()
    make_loss(compiled(make_batch(step, rank))).backward()


def train(how: str, rank: int) -> list[dict[str, Any]]:
    model = make_model()
    compiled, runtime = compile_as(how, model)
    if "alone" in how:
        runtime.process_group = None
    if "group of its own" in how:
        runtime.process_group = [distributed.new_group([0]), distributed.new_group([1])][rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(how, compiled, step, rank)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        values = [gradient.tolist() for gradient in gradients] if step == 0 else []
        if "cleaned" in how:
            for gradient in gradients:
                gradient.nan_to_num_(0, 0, 0)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        before = digest(model)
        optimizer.step()
        seen.append(
            {
                "skipped": runtime.last_step_skipped,
                "scale": runtime.scale,
                "overflowed": runtime.overflowed,
                "finite": finite,
                "moved": digest(model) != before,
                "parameters": digest(model),
                "gradients": values,
            }
        )
    return seen


WAYS = [
    "compiled inside DDP",
    "compiled inside DDP, cleaned",
    "compiled inside DDP, accumulated",
    "compiled outside DDP",
    "without DDP",
    "without DDP, alone",
    "without DDP, group of its own",
]


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    seen = {}
    for how in WAYS:
        torch._dynamo.reset()
        seen[how] = train(how, rank)
    torch._dynamo.reset()
    try:  # last, as processes that wait for each other in vain are of no more use
        seen[ONE_WITHOUT] = train(ONE_WITHOUT, rank)
    except RuntimeError as error:
        seen[ONE_WITHOUT] = [{"error": str(error)}]
    distributed.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
