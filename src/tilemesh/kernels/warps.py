"""What kernels with warps of different trades share, in Gluon: barriers in shared memory, and places in a ring.

A loading warp fills a ring of stages and groups of warps empty it: `ready` barriers say that a stage has arrived,
`free` ones that it may be overwritten. A barrier's phase ends when as many have arrived as it counts.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Its name in Triton 3.7, and the one before.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of which waits for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def next_place(place, lap, STAGES: gl.constexpr):
    """The stage after this one, and how often the ring was gone around."""
    place += 1
    around = place == STAGES
    return gl.where(around, 0, place), gl.where(around, lap + 1, lap)
