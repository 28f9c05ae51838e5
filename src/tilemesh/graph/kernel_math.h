/* What generated kernels need: single-precision functions without branches, so that compilers use vector instructions.
   Polynomials and ranges are those of the Cephes library (S. L. Moshier); errors are a few units in the last place. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
#endif

static inline float as_float(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int32_t as_bits(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }

static inline float read_bf16(uint16_t half) { return as_float((int32_t)((uint32_t)half << 16)); }
static inline uint16_t write_bf16(float value) {
  uint32_t bits = (uint32_t)as_bits(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0u : rounded);
}
static inline float round_bf16(float value) { return read_bf16(write_bf16(value)); }

/* Of magnitudes, by their bits: compilers make several instructions of a comparison that NaN may fail. NaN: `most`. */
static inline float at_most(float magnitude, float most) {
  int32_t one = as_bits(magnitude), other = as_bits(most);
  return as_float(one < other ? one : other);
}

static inline float fast_exp(float x) {
  float y = copysignf(at_most(fabsf(x), 104.0f), x);
  float n = rintf(y * 1.44269504088896341f);
  float r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t whole = (int32_t)n;
  int32_t half = whole >> 1;
  p = p * as_float((half + 127) << 23) * as_float((whole - half + 127) << 23);
  return x == x ? p : x;
}

static inline float fast_log(float x) {
  int tiny = x < 1.17549435e-38f;
  int32_t bits = as_bits(tiny ? x * 8388608.0f : x);
  float e = (float)(((bits >> 23) & 255) - 126 - (tiny ? 23 : 0));
  float m = as_float((bits & 0x7fffff) | 0x3f000000);
  int low = m < 0.707106781186547524f;
  e = low ? e - 1.0f : e;
  m = low ? m + m - 1.0f : m - 1.0f;
  float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  float result = m + y + e * 0.693359375f;
  result = x == INFINITY ? x : result;
  result = x == 0.0f ? -INFINITY : result;
  return x < 0.0f || x != x ? NAN : result;
}

/* 2 to the power of a number between -126 and 127; within 1.3 units in the last place. */
static inline float exp2_between(float x) {
  float n = rintf(x), r = x - n, z = r * r;
  float p = (1.327647129e-3f * r + 9.675540961e-3f) * z + (5.550713092e-2f * r + 2.402212024e-1f);
  p = p * z + (6.931469440e-1f * r + 1.0f);
  return p * as_float(((int32_t)n + 127) << 23);
}

static inline float fast_tanh(float x) {
  float a = fabsf(x), z = x * x, w = z * z;
  float p = (-5.70498872745e-3f * z + 2.06390887954e-2f) * w + (-5.37397155531e-2f * z + 1.33314422036e-1f);
  p = p * z - 3.33332819422e-1f;
  float large = 1.0f - 2.0f / (exp2_between(at_most(a, 10.0f) * 2.88539008f) + 1.0f);
  return copysignf(a >= 0.625f ? large : p * z * a + a, x);  // NaN is in the second
}

static inline float fast_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

/* Below 0.9 a polynomial; above, 1 - 2^p(x) with p fitted to the logarithm of what is missing to 1. */
static inline float fast_erf(float x) {
  float a = fabsf(x), z = x * x, w = z * z;
  float s = (-6.090360112e-4f * z + 5.011962727e-3f) * w + (-2.677890845e-2f * z + 1.128214076e-1f);
  s = s * w + (-3.761252463e-1f * z + 1.283791512e-1f);
  float t = at_most(a, 4.0f), u = t * t;
  float p = (2.859706292e-4f * t - 4.422568716e-3f) * u + (3.219405189e-2f * t - 1.502043009e-1f);
  p = p * u + (-9.189622402e-1f * t - 1.627067447f);
  float far = copysignf(1.0f - exp2_between(p * t - 2.401324891e-4f), x);
  return a >= 0.9f ? far : x * s + x;  // NaN is in the second
}

static inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
