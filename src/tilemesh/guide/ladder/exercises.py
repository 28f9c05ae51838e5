"""Exercises of the ladder, with the wrong answers that have a reason."""

from __future__ import annotations

from tilemesh.guide.exercise import choice, numeric

BLOCKS = numeric(
    "blocks",
    "A matrix of 13 x 5 elements, one thread for each, blocks of 4 x 3 threads. How many threads are launched?",
    96,
    wrong={
        65: "65 threads have work. A grid is made of whole blocks: count the blocks first, rounded up in both "
        "directions.",
        72: "72 would be 6 blocks, 3 x 2: 13 / 4 = 3.25 was rounded to the nearest. Three blocks of 4 reach to 12; the "
        "13th element needs a block, too.",
        36: "36 would be 3 blocks, 3 x 1: both quotients were rounded down. What is left over in each direction needs "
        "blocks, too.",
        8: "8 is the number of blocks, 4 x 2. Each has 12 threads.",
    },
    otherwise="Blocks: 13 / 4 rounded up times 5 / 3 rounded up. Each has 4 * 3 threads.",
    explanation="4 x 2 blocks of 12 threads: 96, of which 31 find that they are outside and do nothing.",
)

V2_READS = numeric(
    "register_reads",
    "N = 1024. Each thread computes 4 x 4 elements of C as outer products in registers (v2). How many elements are "
    "read from global memory in all?",
    2 * 1024**3 // 4,
    wrong={
        2
        * 1024**3: "2N³ is v1: each thread one element. Here a value of A serves 4 columns and one of B serves 4 rows.",
        1024**3 // 4 + 1024**3: "N³/V + N³ is v1.5: there only A is reused. v2 reuses both.",
        2 * 1024**3 // 16: "2N³/V² divides by V twice: a thread has V² sums but reads 2V values for each k, not 2.",
        2 * 1024**2: "2N² would be each element once: only if all of C were one thread's tile.",
    },
    otherwise="A thread reads 2V values for each of N steps, and there are (N/V)² threads.",
    explanation="(N/V)² threads times 2VN reads: 2N³/V.",
)

CONVOLUTION = numeric(
    "halo",
    "A block of 256 threads computes 256 outputs of a convolution of width 5, with its inputs in shared memory. How "
    "many elements does it read from global memory?",
    260,
    wrong={
        1280: "256 * 5 is without shared memory: every thread reads its own five.",
        256: "The last outputs need inputs beyond the block's own 256.",
        258: "2 more is right for width 3. Width 5 reaches 4 further.",
        261: "Width 5 reaches 4 elements beyond the first, not 5.",
    },
    otherwise="Output i needs inputs i to i + 4. Which inputs do outputs 0 to 255 need together?",
    explanation="Inputs 0 to 259: 256 + 4 instead of 1,280.",
)

BANK = numeric(
    "bank_passes",
    "32 threads of a warp read words[threadIdx.x * 12] from shared memory (4-byte words, 32 banks). How many "
    "passes over the banks?",
    4,
    wrong={
        1: "One pass needs 32 different banks. 12 and 32 have a common divisor: banks repeat.",
        12: "12 words lie between neighbours, but what counts is how many of the 32 words fall into one bank.",
        3: "32 / 12 rounded up is no bank count: compute (12 * thread) mod 32 for a few threads.",
        8: "8 different banks are asked. 32 words in 8 banks are how many each?",
    },
    otherwise="Thread t asks bank 12 t mod 32. How many threads share bank 0?",
    explanation="gcd(12, 32) = 4: thread 0, 8, 16 and 24 all ask bank 0, for different words.",
)

BARRIER = choice(
    "barrier",
    "v3 has two __syncthreads() for each tile: after fetching, and after multiplying. What happens without the second?",
    {
        "A fast thread overwrites the tile while a slow one still multiplies with it.": None,
        "A thread multiplies with elements that nobody has fetched yet.": "That is what the *first* barrier prevents: "
        "it stands between fetching and multiplying.",
        "Nothing: all threads of a block run in step.": "Only the lanes of one warp run in step, and not even those "
        "for sure. A block of 256 threads has 8 warps that the scheduler runs in any order.",
        "The result is right, but slower.": "Leaving a barrier out makes a kernel faster, and here wrong: some thread "
        "still reads the tile that is being overwritten.",
    },
    explanation="The interpreter finds it: `race: thread ... writes sA[..][..], which another thread read`.",
)

EXERCISES = (BLOCKS, V2_READS, CONVOLUTION, BANK, BARRIER)
