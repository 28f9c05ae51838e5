"""Kernels that are launched while the one before still runs (Hopper and later: programmatic dependent launch).

The one idea: a launch and the first loads of a kernel take a microsecond or two, and nothing of that needs the kernel
before. A step with `early` set is launched as soon as every program of the kernel before has called `take_turn`.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def take_turn():
    """First thing in a kernel that may be launched early: touch nothing until the one ahead has ended and is seen.

    Only then may the kernel behind be launched early in its turn: so whatever runs early finds all that came before
    the kernel ahead of it done, however long the chain.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
