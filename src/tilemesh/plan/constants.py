"""Every constant of the cost model, with where it came from. Nothing here knows any model's name or size.

FITTED: on the 22B pair of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
table 5 (A100-80GB: 1.42 s with full recomputation, 1.10 s with sequence parallelism and selective), and on nothing
else. That is one number. MEASURED: by us. PUBLISHED: by others. COUNTED: follows from what the code does.
ASSUMED: none of these; to be replaced by a measurement. Peaks, bandwidths and latencies are `core.hardware`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilemesh.kernels.adamw import cost as adamw

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
    "local": 1.0,  # its peak is what was measured
}
"""Of the dense peak, what a large matmul sustains beside its waves and fills."""

IDLE_POWER = 1 / 7
"""Of a board's power, what it draws whatever it computes. ASSUMED: 100 of an H100's 700 W."""

Tiles = tuple[tuple[int, int, float], ...]
TILES: Tiles = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75))
"""Tiles a vendor's library chooses from, and their rate: ASSUMED from the ratio of FLOPs to bytes a tile loads."""
HOPPER_TILES: Tiles = (*TILES, (192, 192, 1.0), (128, 192, 0.96))
"""Compute capability 9 and later: the names of cuBLAS's kernels on an H200 have these as well; rates ASSUMED alike."""

TILE_FILL_K = 128
"""Steps of k that filling a tile's pipeline and writing its result cost. ASSUMED: about 2 to 3 µs on an A100, where a
256 x 128 tile takes 23 ns per step at the peak (2 x 256 x 128 FLOPs on one of 108 multiprocessors)."""

LEAST_SPLIT_K = 512
"""Steps of k a part of a split product has at least. ASSUMED: four fills."""

FP8_GAIN = 1.84
"""How many times as fast as in 16 bits a product in 8 is, casts apart. MEASURED on an H200, torch's `_scaled_mm` beside
cuBLAS: 4096^3 97.9 for 178 us, 8192^3 854 for 1616; with 16,384 tokens from 1.73 to 1.94."""

UNALIGNED_FRACTION = 0.16
"""Of the sustained rate, what a 16-bit matmul reaches whose rows are no multiple of 8 elements, where nobody pads them.
MEASURED on an H200: 95, 140 and 150 of 800 TFLOP/s for the three products of 32,768 x 768 x 50,257."""

FUSED_ATTENTION_FRACTION: Mapping[str, tuple[float, float]] = {
    # PUBLISHED: FlashAttention-2 (Dao 2023, A100, causal, head width 128, long sequences): about 190 and 160 of 312.
    "a100-80": (0.62, 0.50),
    # PUBLISHED: the same kernel on H100 (Shah et al. 2024, figures 5 and 6): about 370 and 330 TFLOP/s of 989; what
    # published training runs on H100 had. What torch has now is below.
    "h100": (0.37, 0.33),
    "h200": (0.37, 0.33),
    "b200": (0.37, 0.33),  # ASSUMED
    "a10": (0.50, 0.40),  # ASSUMED
    "t4": (0.30, 0.25),  # ASSUMED: no FlashAttention-2 there; torch's memory-efficient kernel
    "cpu": (0.20, 0.25),  # ASSUMED; a CPU is planned for with its calibration
    "local": (0.20, 0.25),  # ASSUMED, for a calibration without attention in it
}
"""Of the dense peak, forward and backward, the masked half not counted as work."""

_HOPPER = {64: (0.435, 0.435), 128: (0.55, 0.51)}
TORCH_ATTENTION_FRACTION: Mapping[str, Mapping[int, tuple[float, float]]] = {
    # MEASURED on an H200, torch 2.11 (cuDNN's kernels), causal, bf16, beside 800 TFLOP/s of matmul: head width 64 at
    # 1024, 2048, 4096 tokens forward 290, 359, 395 and backward 211, 291, 349 TFLOP/s; width 128 at 1024 to 8192 tokens
    # 371, 451, 565, 561 and 207, 343, 423, 475. These figures and the fill below follow that within 12 % (the backward
    # pass of width 128 at 1024 tokens: 21 %). Narrow heads make more exponentials a FLOP.
    "h100": _HOPPER,  # the same processor
    "h200": _HOPPER,
}
"""The same for torch's own kernel, by head width, for long sequences. Devices not here: the figures above."""

TORCH_ATTENTION_FILL = (600, 1250)
"""Tokens of a sequence that take as long again, forward and backward, on these. MEASURED with the above."""

BLOCK_GAIN, BLOCK_FILL = 2.0, 16
"""Of torch's attention on a CPU: the rate of a whole square beside that of a causal one, of which the seen half counts,
and queries that take as long again beside those of a block. MEASURED on a Neoverse-N1, torch 2.13, float32, heads of
32: 128 x 128 causal 7.6 GFLOP/s forward, whole blocks 64 x 32 14.3, 32 x 32 11.8, 32 x 16 10.2, 16 x 16 and 16 x 32
6.2; backward 9.6, 15.9, 15.5, 12.3, 7.6. Not measured on x86-64."""

EXPONENTIAL_FLOPS = 80
"""FLOPs of matmul a CPU does in the time of one exponential, where that was not measured. ASSUMED: 20 instructions,
against two vector units that each multiply and add."""

# ---- memory ----------------------------------------------------------------------------------------------------

STREAM_FRACTION = 0.85
"""Of the datasheet's bandwidth, what a kernel that only moves bytes reaches. ASSUMED; copies on A100 and H200 reach
0.85 to 0.9."""

PASS_FRACTION: Mapping[bool, Mapping[str, float]] = {
    # A GPU. MEASURED on an H200 beside a copy's 4.23 TB/s, kernels that torch.compile made for gpt2-124m, 32 x 1024:
    # norms and sums over rows 2.3 to 2.8 TB/s, the softmax over 50,304 logits 1.47 TB/s read; gelu's derivative 3.1 to
    # 3.2 TB/s. Rows of 50,257, with 8 and with 32 sequences: softmax 1.19 and 1.12, its derivative 1.97 and 1.89 TB/s.
    # For tinyllama-1.1b, 8 x 2048: rotary positions 3.06 forward, 2.86 backward; silu 4.4 and 4.3, as a copy.
    False: {
        "plain": 1.0, "rows": 0.65, "softmax": 0.35, "halves": 1.0, "activation": 0.75, "turned": 0.70,
        "odd rows": 0.45, "odd softmax": 0.27, "gathered": 1.0, "strided": 0.70,
    },
    # A CPU's figures are measured by kind; where they were not, all are that of a product. Rows of 512 bytes by their
    # numbers, and added there: MEASURED on a Neoverse-N1, torch 2.13, 12.3 and 7.5 beside 24.3 GB/s. Copies of turned
    # matrices of 256 to 2,048 rows there: 5.7 to 6.7 beside a copy's 33 to 41 GB/s.
    True: {
        "plain": 1.0, "rows": 1.0, "softmax": 1.0, "halves": 1.0, "activation": 1.0, "turned": 1.0,
        "odd rows": 1.0, "odd softmax": 1.0, "gathered": 0.5, "strided": 0.17,
    },
}  # fmt: skip
"""Of the bandwidth, what kernels reach that only move bytes, by kind, on a GPU and on a CPU."""

MULTI_TENSOR_FRACTION = 0.80
"""Of a GPU's bandwidth, what torch's kernels over all parameters at once reach. MEASURED on an H200 beside a copy's
4.23 TB/s, with 124 M and with 1.1 G parameters: fused AdamW 3.52 and 3.40, dividing on its way 3.26 (1.1 G), scaling
3.53 and 3.63, norm 3.09 and 3.50 TB/s; a whole update 0.83 and 0.78 of a copy."""

_ADAM = {dtype: adamw.cost(1, 1, dtype).bytes_moved for dtype in ("float32", "float64")}
"""What AdamW itself moves for a parameter, by our operator's own count: 28 and 56 bytes."""

OPTIMIZER_BYTES: Mapping[str, int] = {
    # COUNTED: gradients' norm 4, scaled 8, and Adam.
    "fp32": 12 + _ADAM["float32"],
    "bf16": 12 + _ADAM["float32"],
    # ... and taking the loss scale out, 8.
    "fp16": 20 + _ADAM["float32"],
    # COUNTED as Megatron does it, each in its own kernel, gradients accumulated in fp32: cleared 4, first added 10,
    # scaled and checked 8, norm 4, clipped 8, Adam, weights copied to 16 bits 6.
    "bf16-master": 40 + _ADAM["float32"],
    "fp64": 24 + _ADAM["float64"],
    "fp8": 40 + _ADAM["float32"],  # as bf16-master
}
"""Bytes read and written for one parameter in a step."""

DIVIDED_BYTES: Mapping[str, int] = {
    "fp32": 8 + _ADAM["float32"],
    "bf16": 8 + _ADAM["float32"],
    "fp64": 16 + _ADAM["float64"],
}
"""The same for our code on one GPU alone, where the optimiser divides by what clipping asks for on its way. COUNTED:
norm 4, Adam, which also writes the gradients back, 4."""

ACCUMULATE_BYTES: Mapping[str, int] = {
    # COUNTED: torch adds a microbatch's gradients to those before: two read, one written.
    "fp32": 12,
    "bf16": 12,
    "fp16": 12,
    "fp64": 24,
    # The matmul adds onto the gradients itself (Megatron's default); its traffic hides behind its FLOPs.
    "bf16-master": 0,
    "fp8": 0,
}
"""Bytes read and written for one parameter after each microbatch but the first."""

RESERVED_BYTES: Mapping[str, int] = {
    "gpu": 3 * 2**29,
    "cpu": 70 * 2**20,
    "glibc": 42 * 2**20,
    "compiler": 122 * 2**20,
}
"""A process's own. GPU: CUDA context 0.5 GiB, NCCL's buffers and cuBLAS's workspace another; ASSUMED. CPU: what torch
loads with its first step, and torch's compiler, which its recomputation imports too; MEASURED on layouts of the tiny
preset, arm64: alone 65 to 75 MiB more than the tensors, with recomputation 121 more; x86-64 (glibc), one rank alone in
dp 2, tp 2 and pp 2: 40 to 42 MiB more."""

BESIDE: Mapping[str, tuple[int, int, float]] = {"": (9 << 20, 16 << 20, 0.17), "glibc": (12 << 20, 0, 1.2)}
"""Of a process of a CPU beside other ranks, by who gives it memory: what it has more of its own than one alone (what
passing messages takes, of it a stage of 4 MiB in shared memory for every rank of a group), what more between stages,
and of what a pass has, what the allocator holds more: freed blocks that did not go back to the system in time, and what
lies between blocks. MEASURED, least squares: arm64 (mimalloc) fifteen layouts of two and four ranks; two ranks that do
the same differ by up to a tenth of all they hold (184 and 167 MiB). x86-64 (glibc) nine layouts, where blocks that do
not fit again grow with a pass as it is before tp cuts it; two runs of a layout differ by up to a third."""

HEADROOM = 0.05
"""Of the memory that the driver reports, what a plan leaves free unless told otherwise (`--headroom`); an allocator's
fragments take some of it. ASSUMED."""

# ---- links -----------------------------------------------------------------------------------------------------

LINK_FRACTION = 0.8
"""Of a link's line rate, what collectives reach. PUBLISHED: NCCL's maintainers give 370 of NVLink4's 450 GB/s
(nccl-tests issue 212, protocol overhead about 20 %); 230 to 240 of NVLink3's 300 are common on A100. InfiniBand:
ASSUMED the same."""

MEMORY_LINK_FRACTION = 0.75
"""Of the copy bandwidth of all cores (a copied byte counted once), what the ranks of a CPU together send.
MEASURED on two cores, Open MPI's all_reduce of 1 MiB over 2, 4, 8 ranks: 325, 987, 2,118 us beside a copy of 11.1 GB/s,
which is 0.6 of it; 0.8 of this is LINK_FRACTION."""

MEMORY_MESSAGE_S = (17e-6, 3.5e-6)
"""A message between ranks of a CPU: our own call in Python (MEASURED, 33.7 us a call of two messages), and, where ranks
outnumber cores, so much more for each rank a core has: 4 bytes over 4 and 8 ranks on two cores took 27 and 94 us."""

HIDDEN_COST = 0.5
"""Of an exchange that runs beside matmuls, the part it costs all the same: it takes multiprocessors and bandwidth from
them, as long as its bytes would take between two GPUs of one node. ASSUMED: half way between free and not hidden.
(Not fitted, but agreeing: table 4 of the paper above has 11.9 and 11.8 ms for the backward pass of a 22B layer without
and with sequence parallelism; this gives 12.1 and 12.0.)"""

# ---- serving ---------------------------------------------------------------------------------------------------

GRAPH_KERNEL_S = (0.8e-6, 1.6e-6)
"""What a kernel of a decode step in a CUDA graph takes beside moving its bytes: its start, its first loads, its last
stores; of one sequence, and of several. MEASURED on an H200 for 1.1 B and 8 B Llama shapes: one sequence of 1,024
tokens takes 0.778 and 3.938 ms, which is 0.9 and 0.6 us for each kernel counted here beside the bytes at a copy's rate,
weights being read before the kernel ahead has ended; chains of the kernels for 64 sequences come to 1.5 to 1.8 us."""

EXCHANGE_HOST_S = 0.45e-3
"""What Python takes to call the other ranks once, as an operator of a compiled layer, with what that launches. MEASURED
on the host of an H200, one rank alone of dp 2 x tp 8 x pp 4; with it dp 8 x tp 8 is predicted 12 % too short and dp 4 x
cp 2 x tp 8, whose ring leaves the graph, 27 %."""

SERVE_HOST_S: Mapping[str, tuple[float, float]] = {
    # MEASURED on a Neoverse-N1 core, a model of two layers, 1, 16 and 64 sequences: 0.5, 2.3 and 7.5 ms per step.
    "cpu": (400e-6, 111e-6),
    # MEASURED on the host of an H200, where the next step is prepared while one runs: the GPU pauses for 0.02 ms.
    "gpu": (20e-6, 0.0),
}
"""What the engine does while the device waits, a step and a sequence: planning, tables, drawing, booking, telling."""

SERVE_LAUNCH_S = (250e-6, 8e-6, 0.3e-6)
"""What a step takes the host of a GPU to plan, launch and book: in all, for each sequence, and for each token of a
prompt. CALCULATED from 13 us per sequence on a Neoverse-N1 core (a step of 256 takes 3.4 ms) and the ratio of the two
hosts' times per sequence for an earlier version of the engine (0.6); likewise for tokens."""

WHOLE_HOST_S: Mapping[str, tuple[float, float]] = {"cpu": (200e-6, 14e-6), "gpu": (20e-6, 0.0)}
"""As SERVE_HOST_S where nobody hears of tokens before an answer ends: many are then stepped as arrays. CPU: MEASURED on
two idle cores of a Xeon (Sapphire Rapids), a model of four layers: 48 steps of 64 and 128 answers took 0.14 and 0.28 s,
which is 9 and 18 us for each answer beside the operators as they are predicted."""

ANSWER_ROW_S = 20e-6
"""What Python takes to lay out an answer for a pass. MEASURED on a Xeon, in processor time: 3.7 ms for 192."""

WHOLE_LAUNCH_S = (250e-6, 1.2e-6, 0.3e-6)
"""As SERVE_LAUNCH_S, likewise: CALCULATED from 2.0 us per sequence on a Neoverse-N1 core and the same ratio."""

PAGED_ATTENTION_FRACTION = 0.87
"""Of a copy's rate, what attention over pages reaches on a GPU. MEASURED on an H200 with 64 sequences of 1,024 tokens:
0.72 (1.1 B) and 0.95 (8 B); with 256 of them 0.88 and 1.0."""
