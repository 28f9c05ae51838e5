/* What C functions for a CPU share: it is put before their text. */
#include <math.h>
#include <stdint.h>

/* Numbers of a vector register. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Weights, keys and values as they are stored: float, or the upper 16 bits of one (bfloat16). All else is float. */
#ifdef STORED_BFLOAT16
typedef uint16_t stored;

static inline float wide(stored x) {
    union { uint32_t i; float f; } upper = {.i = (uint32_t)x << 16};
    return upper.f;
}

/* The nearest one, of two that are as near the even one; NaN stays NaN. */
static inline stored narrow(float x) {
    union { float f; uint32_t i; } bits = {.f = x};
    return x == x ? (bits.i + 0x7fff + (bits.i >> 16 & 1)) >> 16 : bits.i >> 16 | 0x40;
}
#else
typedef float stored;

static inline float wide(stored x) { return x; }
static inline stored narrow(float x) { return x; }
#endif

/* e^x for x <= 0 to about two units in the last place, by operations that vectorise; below -87 it is 0. */
static inline float power(float x) {
    const float clipped = x < -87.0f ? -87.0f : x;
    const float n = rintf(clipped * 1.44269504f);
    const float r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
    const float p = 1 + r * (1 + r * (0.5f + r * (0.166666657f + r * (4.16665795e-2f + r * (8.33345205e-3f +
                    r * 1.39819995e-3f)))));
    union { int32_t i; float f; } scale = {.i = ((int32_t)n + 127) << 23};
    return x < -87.0f ? 0 : p * scale.f;
}
