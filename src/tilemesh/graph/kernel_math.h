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

static inline float fast_exp(float x) {
  float y = x < -104.0f ? -104.0f : x;
  y = y > 89.0f ? 89.0f : y;
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
  return p * as_float((half + 127) << 23) * as_float((whole - half + 127) << 23);
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

static inline float fast_tanh(float x) {
  float a = fabsf(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  float large = copysignf(1.0f - 2.0f / (fast_exp(a + a) + 1.0f), x);
  float small = copysignf(p * z * x + x, x);  // the sum of 0.0 and -0.0 is 0.0
  return a < 0.625f ? small : (x != x ? x : large);
}

static inline float fast_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

static inline float fast_erf(float x) {
  float a = fabsf(x), z = x * x;
  float t = 7.853861353153693e-5f;
  t = t * z - 8.010193625184903e-4f;
  t = t * z + 5.188327685732524e-3f;
  t = t * z - 2.685381193529856e-2f;
  t = t * z + 1.128358514861418e-1f;
  t = t * z - 3.761262582423300e-1f;
  t = t * z + 1.128379165726710e+0f;
  float b = a < 1.0f ? 1.0f : a, q = 1.0f / b, y = q * q;
  float p = 2.326819970068386e-2f;
  p = p * y - 1.387039388740657e-1f;
  p = p * y + 3.687424674597105e-1f;
  p = p * y - 5.824733027278666e-1f;
  p = p * y + 6.210004621745983e-1f;
  p = p * y - 4.944515323274145e-1f;
  p = p * y + 3.404879937665872e-1f;
  p = p * y - 2.741127028184656e-1f;
  p = p * y + 5.638259427386472e-1f;
  float r = -1.047766399936249e+1f;
  r = r * y + 1.297719955372516e+1f;
  r = r * y - 7.495518717768503e+0f;
  r = r * y + 2.921019019210786e+0f;
  r = r * y - 1.015265279202700e+0f;
  r = r * y + 4.218463358204948e-1f;
  r = r * y - 2.820767439740514e-1f;
  r = r * y + 5.641895067754075e-1f;
  float tail = fast_exp(-b * b) * q * (b < 2.0f ? p : r);
  float far = copysignf(1.0f - tail, x);
  return a < 1.0f ? x * t : (x != x ? x : far);
}

static inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
