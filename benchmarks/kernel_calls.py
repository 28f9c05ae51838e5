"""Call time of small operators on a GPU beside eager: what the host needs to check, find and launch a call.

    python benchmarks/kernel_calls.py [--seconds 40]

Uses the public functions alone, so that two versions of this package can be compared by running it in both. Candidates
take turns; each line has the median and the 20th and 80th percentile of the time per call, in microseconds.
"""

from __future__ import annotations

import argparse

import torch

import tilemesh as tm
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.timing import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of readings, over all cases")
    given = parser.parse_args()
    fused_matmul, scale_shift = tm.kernels.fused_matmul, tm.kernels.scale_shift
    a, b, c = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(3))
    weight = b.clone().requires_grad_()
    cases = {
        "fused_matmul 512x512x512": {
            "ours": lambda _: fused_matmul(a, b, c),
            "eager": lambda _: torch.relu(a @ b + c),
        },
        "fused_matmul 512x512x512 with gradients": {
            "ours": lambda _: fused_matmul(a, weight, c).backward(c),
            "eager": lambda _: torch.relu(a @ weight + c).backward(c),
        },
    }
    for rows, columns in ((16384, 1024), (8, 64)):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        scale, shift = (torch.randn(columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cases[f"scale_shift {rows}x{columns}"] = {
            "ours": lambda _, x=x, scale=scale, shift=shift: scale_shift(x, scale, shift),
            "eager": lambda _, x=x, scale=scale, shift=shift: x * scale + shift,
        }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, candidates in cases.items():
        result = compare(candidates, timer=call_timer(), repeats=200, warmup=20, seconds=given.seconds / len(cases))
        for who, sample in result.items():
            spread = f"{sample.p20 * 1e6:.2f} to {sample.p80 * 1e6:.2f}"
            print(f"{name:42} {who:6} {sample.median * 1e6:8.2f} us  ({spread}, {sample.n} readings)", flush=True)


if __name__ == "__main__":
    main()
