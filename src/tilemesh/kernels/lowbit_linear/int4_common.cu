// What both kernels of 4-bit codes have: it stands before each of them. Set before: HALF (activations are float16),
// EARLY (0: launched when the kernel ahead has ended. 1: before, and waits for it. 2: the same, but codes, scales and the
// gains of a norm were there before the kernel ahead began, and are on their way before it has ended).
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int CHUNK = 128;  // inputs that a warp multiplies between two loads

__device__ __forceinline__ uint4 load_codes(const unsigned char* from) {
    uint4 made;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "l"(from));
    return made;
}

__device__ __forceinline__ float load_scale(const float* from) {
    float made;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(made) : "l"(from));
    return made;
}

// Not the read-only way: the kernel ahead may still write them when this one begins.
__device__ __forceinline__ uint4 load_tokens(const void* from) {
    uint4 made;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "l"(from) : "memory");
    return made;
}

// As `take_turn` in kernels/early.py: only who has seen the kernel ahead end lets the one behind begin. `never` is false,
// which the assembler does not know: it would take the wait past the loads before it, but not past a branch.
__device__ __forceinline__ void take_turn(bool never) {
#if EARLY == 2
    if (never) asm volatile("trap;");
#endif
#if EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if HALF
constexpr u32 LEAD = 0x64006400u;
constexpr float ADDS = 1032.0f;  // the leading one, and the 8 that codes are stored with
#else
constexpr u32 LEAD = 0x43004300u;
constexpr float ADDS = 136.0f;
#endif

// Pairs of codes (0, 4), (1, 5), (2, 6), (3, 7) of a word, each behind the leading one. One instruction selects the bits
// and puts the leading ones: the compiler would take two.
__device__ __forceinline__ void unpack(u32 word, u32* made) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made[i]) : "r"(word >> (4 * i)), "n"(0x000F000F), "r"(LEAD));
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}
