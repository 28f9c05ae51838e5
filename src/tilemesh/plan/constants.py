"""Every constant of the cost model, with where it came from. Nothing here knows any model's name or size.

FITTED: on the 22B pair of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
table 5 (A100-80GB: 1.42 s with full recomputation, 1.10 s with sequence parallelism and selective), and on nothing
else. That is one number. MEASURED: by us. PUBLISHED: by others. COUNTED: follows from what the code does.
ASSUMED: none of these; to be replaced by a measurement. Peaks, bandwidths and latencies are `core.hardware`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

# ---- matmul ----------------------------------------------------------------------------------------------------

MATMUL_FRACTION: Mapping[str, float] = {
    # FITTED: least squares of the two relative errors, which come to about +1 % and -1 %. The pair is rounded to half
    # a percent each, so a second constant fitted to their difference would fit the rounding.
    "a100-80": 0.778,
    # MEASURED on an H200, cuBLAS, benchmarks/results/matmul_rows_h200_*.jsonl: the median over twelve large aligned
    # shapes in bf16 and fp16, waves and fills taken out; from 0.70 (8192^3, where the board reaches its power limit) to
    # 0.84. Shapes that are not multiples of 8 run at a quarter of that, which is not modelled: pad them.
    "h200": 0.74,
    "h100": 0.74,  # the same processor
    "b200": 0.74,  # ASSUMED: as the generation before
    # ASSUMED: boards of 70 and 150 W lower their clock long before the tensor cores are busy.
    "t4": 0.50,
    "a10": 0.60,
    "cpu": 0.70,  # ASSUMED; a CPU is planned for with its calibration
}
"""Of the dense peak, what a large matmul sustains beside its waves and fills."""

TILES: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75))
"""Tiles a vendor's library chooses from, and their rate: ASSUMED from the ratio of FLOPs to bytes a tile loads."""

TILE_FILL_K = 128
"""Steps of k that filling a tile's pipeline and writing its result cost. ASSUMED: about 2 to 3 µs on an A100, where a
256 x 128 tile takes 23 ns a step at the peak (2 x 256 x 128 FLOPs on one of 108 multiprocessors)."""

FUSED_ATTENTION_FRACTION: Mapping[str, tuple[float, float]] = {
    # PUBLISHED: FlashAttention-2 (Dao 2023, A100, causal, head width 128, long sequences): about 190 and 160 of 312.
    "a100-80": (0.62, 0.50),
    # PUBLISHED: the same kernel on H100 (Shah et al. 2024, figures 5 and 6): about 370 and 330 TFLOP/s of 989. It is
    # what torch runs; FlashAttention-3 reaches twice that forward.
    "h100": (0.37, 0.33),
    "h200": (0.37, 0.33),
    "b200": (0.37, 0.33),  # ASSUMED
    "a10": (0.50, 0.40),  # ASSUMED
    "t4": (0.30, 0.25),  # ASSUMED: no FlashAttention-2 there; torch's memory-efficient kernel
    "cpu": (0.40, 0.40),  # ASSUMED
}
"""Of the dense peak, forward and backward, the masked half not counted as work."""

# ---- memory ----------------------------------------------------------------------------------------------------

STREAM_FRACTION = 0.85
"""Of the datasheet's bandwidth, what a kernel that only moves bytes reaches. ASSUMED; copies on A100 and H200 reach
0.85 to 0.9."""

OPTIMIZER_BYTES: Mapping[str, int] = {
    # COUNTED: gradients' norm 4, scaled 8, Adam reads them 4 and reads and writes weights and two moments 24.
    "fp32": 40,
    "bf16": 40,
    # ... and taking the loss scale out, 8.
    "fp16": 48,
    # COUNTED as Megatron does it, each in its own kernel, gradients accumulated in fp32: cleared 4, first added 10,
    # scaled and checked 8, norm 4, clipped 8, Adam 28, weights copied to 16 bits 6.
    "bf16-master": 68,
    "fp64": 80,
}
"""Bytes read and written for one parameter in a step."""

ACCUMULATE_BYTES: Mapping[str, int] = {
    # COUNTED: torch adds a microbatch's gradients to those before: two read, one written.
    "fp32": 12,
    "bf16": 12,
    "fp16": 12,
    "fp64": 24,
    # The matmul adds onto the gradients itself (Megatron's default); its traffic hides behind its FLOPs.
    "bf16-master": 0,
}
"""Bytes read and written for one parameter after each microbatch but the first."""

LOGITS_BYTES = 10
"""Bytes a logit: 2 as the matmul writes it, 4 in fp32 for the loss, 4 its gradient. COUNTED, torch's cross-entropy."""

RESERVED_BYTES: Mapping[str, int] = {"gpu": 3 * 2**29, "cpu": 2**28}
"""A process's own: CUDA context 0.5 GiB, NCCL's buffers and cuBLAS's workspace another. ASSUMED."""

USABLE_FRACTION = 0.95
"""Of what the driver reports, what a plan may use; an allocator's fragments take the rest. ASSUMED."""

# ---- links -----------------------------------------------------------------------------------------------------

LINK_FRACTION = 0.8
"""Of a link's line rate, what collectives reach. PUBLISHED: NCCL's maintainers give 370 of NVLink4's 450 GB/s
(nccl-tests issue 212, protocol overhead about 20 %); 230 to 240 of NVLink3's 300 are common on A100. InfiniBand:
ASSUMED the same."""

HIDDEN_COST = 0.5
"""Of an exchange that runs beside matmuls, the part it costs all the same: it takes multiprocessors and bandwidth from
them, as long as its bytes would take between two GPUs of one node. ASSUMED: half way between free and not hidden.
(Not fitted, but agreeing: table 4 of the paper above has 11.9 and 11.8 ms for the backward pass of a 22B layer without
and with sequence parallelism; this gives 12.1 and 12.0.)"""
