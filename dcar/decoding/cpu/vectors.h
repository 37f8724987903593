/* Vectors of floats, and functions of their lanes. */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")
#define ALONE (1 << 17) /* products of fewer multiplications stay on one thread */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float four __attribute__((vector_size(16)));

INLINE vector load(const float *p) { vector v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vector v) { memcpy(p, &v, sizeof v); }
INLINE vector all(float f) { return (vector){0} + f; }
INLINE vector choose(ints which, vector a, vector b) { return (vector)(((ints)a & which) | ((ints)b & ~which)); }

INLINE int any(ints which) {
  int64_t part[LANES / 2], found = 0;
  memcpy(part, &which, sizeof part);
  UNROLL for (int i = 0; i < LANES / 2; i++) found |= part[i];
  return found != 0;
}

INLINE four fold(vector v) {
  four part[LANES / 4];
  memcpy(part, &v, sizeof v);
  return LANES == 16 ? (part[0] + part[1]) + (part[LANES / 4 - 2] + part[LANES / 4 - 1]) : part[0] + part[1];
}

INLINE float total(vector v) {
  four s = fold(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(X, Y, A, B, C, D) __builtin_shufflevector(X, Y, A, B, C, D)
#else
#define SHUFFLE(X, Y, A, B, C, D) __builtin_shuffle(X, Y, (int32_t __attribute__((vector_size(16)))){A, B, C, D})
#endif

/* The totals of four vectors, each as `total` gives it. */
INLINE four totals(const vector *v, long stride) {
  four x = fold(v[0]), y = fold(v[stride]), z = fold(v[2 * stride]), w = fold(v[3 * stride]);
  four xy = SHUFFLE(x, y, 0, 4, 1, 5) + SHUFFLE(x, y, 2, 6, 3, 7);
  four zw = SHUFFLE(z, w, 0, 4, 1, 5) + SHUFFLE(z, w, 2, 6, 3, 7);
  return SHUFFLE(xy, zw, 0, 1, 4, 5) + SHUFFLE(xy, zw, 2, 3, 6, 7);
}

/* The largest of `count` floats, a multiple of LANES. */
static float largest_of(const float *row, long count) {
  vector most = load(row);
  for (long c = LANES; c < count; c += LANES) {
    vector v = load(row + c);
    most = choose(v > most, v, most);
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

INLINE vector within(vector x, float low, float high) { /* NaN stays */
  return choose(x < low, all(low), choose(x > high, all(high), x));
}

INLINE vector exponential(vector x) { /* to 2e-7 of the value; 0 below -88 */
  x = within(x, -88, 88);
  vector n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded */
  vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vector)((__builtin_convertvector(n, ints) + 127) << 23); /* n is -127 at -88: nothing is left */
}

INLINE vector inverse(vector v) {
#ifdef __AVX512F__
  vector r = (vector)_mm512_rcp14_ps((__m512)v); /* to 2^-14; a Newton step doubles the digits */
  return r * (2.0f - v * r);
#else
  return 1.0f / v;
#endif
}

INLINE vector logistic(vector v) { return inverse(exponential(-v) + 1.0f); }
INLINE vector silu(vector v) { return v * logistic(v); }
