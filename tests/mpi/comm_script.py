"""The communicator's cases, as a rank: comm_script.py [full | surface | nodes SIZE]."""

from __future__ import annotations

import sys

import comm_cases

from tilemesh.comm import connect

if sys.argv[1:2] == ["nodes"]:
    comm = connect(timeout_s=60.0, node_size=int(sys.argv[2]))
    done, failures = comm_cases.run_hierarchical(comm, int(sys.argv[2]))
elif sys.argv[1:2] == ["surface"]:
    comm = connect(timeout_s=60.0)
    done, failures = comm_cases.run_surface(comm)
else:
    comm = connect(timeout_s=60.0)
    done, failures = comm_cases.run_all(comm, full="full" in sys.argv[1:])
for failure in failures:
    print(f"rank {comm.rank} of {comm.size} over {comm.backend}: {failure}", flush=True)
if failures:
    sys.exit(1)
print(f"{done} cases right over {comm.backend}", flush=True)
