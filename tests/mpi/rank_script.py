"""What a rank under test does: say hello, meet the others, then behave as told (rank 1 only), then meet them again.

rank_script.py TRANSPORT BEHAVIOUR, the transport being mpi, gloo, or torch: as a rule that is gloo, too.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tilemesh.launch.board import my_status

transport, behaviour, *rest = sys.argv[1:]

if transport == "mpi":
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    meet = MPI.COMM_WORLD.Barrier
elif transport == "torch" and behaviour not in ("well", "kill", "leave"):
    # No torch where its connections play no part: importing it is most of what a short job costs.
    rank = int(os.environ["RANK"])
    meetings = itertools.count()

    def meet() -> None:
        number, folder = next(meetings), Path(os.environ["TILEMESH_JOB"])
        (folder / f"met-{number}-{rank}").touch()
        while not all((folder / f"met-{number}-{who}").exists() for who in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.01)

else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meet = dist.barrier

status = my_status()
status.at("meeting")
meet()
print(f"hello from {rank}", flush=True)
if rank == 1:
    status.at("step 7: misbehaving")
    if behaviour == "raise":
        raise ValueError("the widget is bent")
    if behaviour == "exit":
        sys.exit(3)
    if behaviour == "vanish":
        os._exit(5)
    if behaviour == "abort":
        os.abort()
    if behaviour == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "leave":
        os._exit(0)
    if behaviour == "fail-once" and os.environ["TILEMESH_ATTEMPT"] == "0":
        sys.exit(1)
    if behaviour == "child":
        # A rank that has started something of its own and then fails: that must not stay behind.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        Path(rest[0]).write_text(str(child.pid))
        raise ValueError("with a child")
if behaviour == "sleep":
    status.at("sleeping")
    Path(rest[0], str(rank)).write_text(str(os.getpid()))
    time.sleep(300)
if behaviour == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(rest[0], str(rank)).write_text(str(os.getpid()))
    time.sleep(300)
meet()
print(f"goodbye from {rank}")
