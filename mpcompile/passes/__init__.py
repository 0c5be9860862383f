"""The precision passes: they rewrite any functional ATen graph and know nothing of who made it.

Read in this order: ``policy`` (what decides), ``op_classes`` (the table), ``compute_plan`` (which operations compute
low), ``casts`` (carries it out), ``storage_plan`` (which values are kept low; ``cost_model`` weighs, ``minimum_cut``
solves), ``storage`` (carries it out), ``pipeline`` (their order). ``intent`` and ``kernels`` work earlier, on Dynamo's
graph.
"""

from mpcompile.passes.casts import fold_casts, insert_casts
from mpcompile.passes.compute_plan import Decision, plan_compute
from mpcompile.passes.op_classes import OpClass, classify, register_op
from mpcompile.passes.pipeline import PASSES, run_passes
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassError, PassResult
from mpcompile.passes.storage import store_low
from mpcompile.passes.verifier import verify

__all__ = [
    "PASSES",
    "Change",
    "Decision",
    "OpClass",
    "PassError",
    "PassResult",
    "Policy",
    "classify",
    "fold_casts",
    "insert_casts",
    "plan_compute",
    "register_op",
    "run_passes",
    "store_low",
    "verify",
]
