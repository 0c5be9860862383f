"""Train a small model in a process of its own, with an Inductor cache that the next process may share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HEAD = """
import json, sys, torch, mpcompile
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())

model, x = Net(), torch.linspace(-1, 1, 40).view(5, 8)

def answer(**values):
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    found = {
        "aot_misses": autograd["autograd_cache_miss"],
        "aot_hits": autograd["autograd_cache_hit"],
        "fx_misses": inductor["fxgraph_cache_miss"],
        "bypasses": autograd["autograd_cache_bypass"] + inductor["fxgraph_cache_bypass"],
    }
    print(json.dumps(found | values))
"""


def train_in_process(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """What ``script`` answers, and how it fared with the caches, which lie in ``folder``.

    The script finds a ``model`` and its input ``x``, and ends with a call of ``answer`` with what can be JSON.
    """
    (folder / "train.py").write_text(_HEAD + script)
    result = subprocess.run(
        [sys.executable, str(folder / "train.py"), *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def assert_warm(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """The first process compiled one graph; the second took all it needed from the caches."""
    assert (cold["aot_misses"], cold["aot_hits"], cold["bypasses"]) == (1, 0, 0)
    assert cold["fx_misses"] > 0
    assert (warm["aot_misses"], warm["aot_hits"], warm["fx_misses"], warm["bypasses"]) == (0, 1, 0, 0)
