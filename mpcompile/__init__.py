"""mpcompile: ``torch.compile(model, backend="mixprec")`` trains an fp32 model in mixed precision.

The backend needs no import: torch finds it by its entry point. This package is for looking at what was decided.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpcompile.analysis.compare import compare
    from mpcompile.analysis.comparison import Comparison
    from mpcompile.analysis.find import find_nonfinite
    from mpcompile.analysis.nonfinite import NonFinite
    from mpcompile.execution.master_weights import MasterWeights, master_weights
    from mpcompile.execution.runtime import Runtime
    from mpcompile.inspection.assertions import assert_precision
    from mpcompile.inspection.explain import explain
    from mpcompile.inspection.registry import reports
    from mpcompile.inspection.report import Report
    from mpcompile.loss_scaling import runtime
    from mpcompile.notices import MixprecError, MixprecWarning
    from mpcompile.passes.op_classes import register_op
    from mpcompile.passes.policy import Policy
    from mpcompile.tuning.tune import tune

try:
    __version__ = version("mpcompile")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

_HOME = {
    "assert_precision": "mpcompile.inspection.assertions",
    "compare": "mpcompile.analysis.compare",
    "Comparison": "mpcompile.analysis.comparison",
    "find_nonfinite": "mpcompile.analysis.find",
    "NonFinite": "mpcompile.analysis.nonfinite",
    "explain": "mpcompile.inspection.explain",
    "runtime": "mpcompile.loss_scaling",
    "Runtime": "mpcompile.execution.runtime",
    "master_weights": "mpcompile.execution.master_weights",
    "MasterWeights": "mpcompile.execution.master_weights",
    "reports": "mpcompile.inspection.registry",
    "Report": "mpcompile.inspection.report",
    "MixprecError": "mpcompile.notices",
    "MixprecWarning": "mpcompile.notices",
    "register_op": "mpcompile.passes.op_classes",
    "Policy": "mpcompile.passes.policy",
    "tune": "mpcompile.tuning.tune",
}

__all__ = [
    "Comparison",
    "MasterWeights",
    "MixprecError",
    "MixprecWarning",
    "NonFinite",
    "Policy",
    "Report",
    "Runtime",
    "__version__",
    "assert_precision",
    "compare",
    "explain",
    "find_nonfinite",
    "master_weights",
    "register_op",
    "reports",
    "runtime",
    "tune",
]


def __getattr__(name: str) -> Any:
    # Importing torch's compiler takes seconds; ``import mpcompile`` does not.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'mpcompile' has no attribute {name!r}")
