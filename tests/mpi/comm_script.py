"""A sample of the communicator's cases, as a rank that somebody else's launcher has started."""

from __future__ import annotations

import sys

import comm_cases

done, failures, backend = comm_cases.on_a_rank("sample")
print(*failures, f"{done} cases right over {backend}", sep="\n", flush=True)
sys.exit(bool(failures))
