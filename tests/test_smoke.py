"""What an installed mpcompile must do.

Needs only the package and pytest, so the file also checks the built wheel outside the checkout.
"""

import json
import subprocess
import sys
import sysconfig
from importlib import metadata, resources
from pathlib import Path

TRAIN_ONE_STEP = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = [parameter.detach().clone() for parameter in model.parameters()]

assert "mpcompile" not in sys.modules
compiled = torch.compile(
    model, backend="mixprec", options={"dtype": "bf16", "compiler": "aot_eager"}
)
compiled(torch.randn(32, 8)).square().mean().backward()
assert "mpcompile" in sys.modules

for name, parameter in model.named_parameters():
    assert parameter.grad is not None, name
    assert parameter.grad.dtype == torch.float32, (name, parameter.grad.dtype)
    assert torch.isfinite(parameter.grad).all(), name
optimizer.step()
for old, new in zip(before, model.parameters()):
    assert new.dtype == torch.float32
    assert not torch.equal(old, new)
print("trained")
"""


SITE_PACKAGES = sysconfig.get_path("purelib")


def is_editable() -> bool:
    # Looks in site-packages only: an egg-info folder in the checkout would be found before it.
    (distribution,) = metadata.distributions(name="mpcompile", path=[SITE_PACKAGES])
    direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(direct_url.get("dir_info", {}).get("editable", False))


def test_backend_is_found_by_name_without_importing_mpcompile(tmp_path: Path) -> None:
    # A process of its own, elsewhere: here mpcompile may be imported already or lie in the cwd.
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_ONE_STEP],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "trained"


def test_passes_are_imported_from_the_installation() -> None:
    import mpcompile.passes

    home = Path(mpcompile.passes.__file__).resolve().parents
    assert (Path(SITE_PACKAGES).resolve() in home) is not is_editable()


def test_types_ship() -> None:
    assert resources.files("mpcompile").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    import mpcompile

    assert mpcompile.__version__ == metadata.version("mpcompile")
