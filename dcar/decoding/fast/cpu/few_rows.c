/* Products of a handful of rows with large weights, which is what a decoding step on a CPU consists of.
 *
 * multiply:        y[m, n] = sum_k x[m, k] w[n, k] + bias[n]                (nn.Linear)
 * multiply_in_out: y[g, m, n] = sum_k x[g, m, k] w[g, k, n] + bias[g, n]    (the stacked heads)
 *
 * Every weight is read once, at the rate of the memory, and meets all rows while it is in a register: five rows cost what one
 * costs. Sums are float32, in an order that does not depend on the number of rows.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define WEIGHT_ROWS(M) ((M) <= 6 ? 4 : 2) /* sums, weights and one x fit the 32 registers */
#define VECTORS(M) ((M) <= 2 ? 8 : (M) <= 6 ? 4 : 2)
#else
#define LANES 8
#define WEIGHT_ROWS(M) ((M) <= 2 ? 4 : (M) <= 5 ? 2 : 1)
#define VECTORS(M) ((M) <= 2 ? 4 : (M) <= 5 ? 2 : 1)
#endif
#define MAX_ROWS 8
#define NEAR 32768 /* bytes of weight rows that a cache holds beside the others */
#define AHEAD 4096 /* bytes of every weight row that are fetched ahead where the next rows are too far */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float four __attribute__((vector_size(16)));

INLINE vector load(const float *p) { vector v; memcpy(&v, p, sizeof v); return v; }
INLINE four fold(vector v) {
  four part[LANES / 4];
  memcpy(part, &v, sizeof v);
  four s = part[0] + part[1];
  if (LANES == 16) s += part[2 % (LANES / 4)] + part[3 % (LANES / 4)];
  return s;
}
INLINE float total(vector v) {
  four s = fold(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

/* The totals of four vectors, each as `total` gives it. */
INLINE four totals(vector a, vector b, vector c, vector d) {
#if defined(__clang__) || __GNUC__ >= 12
#define MERGE(X, Y, A, B, C, D) __builtin_shufflevector(X, Y, A, B, C, D)
#else
#define MERGE(X, Y, A, B, C, D) __builtin_shuffle(X, Y, (whole4){A, B, C, D})
  typedef int32_t whole4 __attribute__((vector_size(16)));
#endif
  four x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  four xy = MERGE(x, y, 0, 4, 1, 5) + MERGE(x, y, 2, 6, 3, 7), zw = MERGE(z, w, 0, 4, 1, 5) + MERGE(z, w, 2, 6, 3, 7);
  return MERGE(xy, zw, 0, 1, 4, 5) + MERGE(xy, zw, 2, 3, 6, 7);
}

INLINE void store(float *p, vector v) { memcpy(p, &v, sizeof v); }

#define ALONE (1 << 17) /* products of fewer multiplications stay on one thread */

/* Call F with the number of rows as a constant, MAX_ROWS of them at most. */
#define WITH_ROWS(M, F, ...)                                                                                           \
  switch (M) {                                                                                                         \
    case 1: F(__VA_ARGS__, 1); break;                                                                                  \
    case 2: F(__VA_ARGS__, 2); break;                                                                                  \
    case 3: F(__VA_ARGS__, 3); break;                                                                                  \
    case 4: F(__VA_ARGS__, 4); break;                                                                                  \
    case 5: F(__VA_ARGS__, 5); break;                                                                                  \
    case 6: F(__VA_ARGS__, 6); break;                                                                                  \
    case 7: F(__VA_ARGS__, 7); break;                                                                                  \
    default: F(__VA_ARGS__, 8);                                                                                        \
  }

/* sums[m][r]: R weight rows with M rows of x, M and R constants. The weights are fetched `ahead` bytes before their turn. */
INLINE void products(const float *x, long x_stride, const float *w, long w_stride, long k, long ahead,
                     float sums[MAX_ROWS][4], const int M, const int R) {
  vector sum[4][MAX_ROWS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) sum[r][m] = (vector){0};
  long c = 0;
  for (; c + LANES <= k; c += LANES) {
    vector a[4];
    UNROLL for (int r = 0; r < R; r++) {
      a[r] = load(w + r * w_stride + c);
      __builtin_prefetch((const char *)(w + r * w_stride + c) + ahead);
    }
    UNROLL for (int m = 0; m < M; m++) {
      long at = m * x_stride + c;
      vector b = load(x + at);
      UNROLL for (int r = 0; r < R; r++) sum[r][m] += a[r] * b;
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    if (R == 4) {
      four s = totals(sum[0][m], sum[1][m], sum[2][m], sum[3][m]);
      memcpy(sums[m], &s, sizeof s);
    } else UNROLL for (int r = 0; r < R; r++) sums[m][r] = total(sum[r][m]);
    for (long i = c; i < k; i++)
      for (int r = 0; r < R; r++) sums[m][r] += x[m * x_stride + i] * w[r * w_stride + i];
  }
}

INLINE void tile(const float *x, const float *w, const float *bias, float *y, long n, long k, const int M, const int R) {
  float sums[MAX_ROWS][4];
  long bytes = R * k * sizeof(float); /* of the rows: the next ones are fetched where they fit a cache */
  products(x, k, w, k, k, bytes <= NEAR ? bytes : AHEAD, sums, M, R);
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int r = 0; r < R; r++) y[m * n + r] = bias ? sums[m][r] + bias[r] : sums[m][r];
}

INLINE void rows(const float *x, const float *w, const float *bias, float *y, long n, long k, long count, const int M) {
  long r = 0;
  for (; r + WEIGHT_ROWS(M) <= count; r += WEIGHT_ROWS(M))
    tile(x, w + r * k, bias ? bias + r : 0, y + r, n, k, M, WEIGHT_ROWS(M));
  for (; r < count; r++) tile(x, w + r * k, bias ? bias + r : 0, y + r, n, k, M, 1);
}

/* `count` weight rows with any number of rows of x. */
static void part(const float *x, const float *w, const float *bias, float *y, long m, long n, long k, long count) {
  for (; m > 0; m -= MAX_ROWS, x += MAX_ROWS * k, y += MAX_ROWS * n) WITH_ROWS(m, rows, x, w, bias, y, n, k, count)
}

#define BLOCK 16 /* weight rows that a thread takes at a time */

void multiply(const float *x, const float *w, const float *bias, float *y, long m, long n, long k, int threads) {
  threads = m * n * k < ALONE ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long r = 0; r < n; r += BLOCK)
    part(x, w + r * k, bias ? bias + r : 0, y + r, m, n, k, n - r < BLOCK ? n - r : BLOCK);
}

#include "panels.c"

#define COLUMNS 4096
#define DEPTH 8
#define PAIR (2 * LANES)

/* PAIR weights as two vectors. */
INLINE void load_pair(const float *p, vector *v) { v[0] = load(p), v[1] = load(p + LANES); }

/* DEPTH rows of the weights are added to the sums of up to COLUMNS columns at a time, so that they are read as they lie. */
INLINE void sweep(const float *x, const float *w, const float *bias, float *y, long n, long k, long width,
                  const int M) {
  float sum[MAX_ROWS][COLUMNS] __attribute__((aligned(64)));
  long paired = width / PAIR * PAIR, c; /* behind them columns are summed one by one */
  for (int m = 0; m < M; m++) {
    memset(sum[m], 0, width * sizeof(float));
    for (c = 0; bias && c < paired; c += PAIR) load_pair(bias + c, (vector *)&sum[m][c]);
    for (; bias && c < width; c++) sum[m][c] = bias[c];
  }
  for (long d = 0; d < k; d += DEPTH) {
    const float *p = w + d * n;
    int depth = k - d < DEPTH ? k - d : DEPTH;
    float scale[MAX_ROWS][DEPTH];
    for (int m = 0; m < M; m++)
      for (int i = 0; i < depth; i++) scale[m][i] = x[m * k + d + i];
    for (c = 0; depth == DEPTH && c < paired; c += PAIR) {
      vector a[DEPTH][2];
      UNROLL for (int i = 0; i < DEPTH; i++) {
        load_pair(p + i * n + c, a[i]);
        __builtin_prefetch(p + (DEPTH + i) * n + c);
        __builtin_prefetch(p + (DEPTH + i) * n + c + LANES);
      }
      UNROLL for (int m = 0; m < M; m++) UNROLL for (int half = 0; half < 2; half++) {
        vector s = load(&sum[m][c + half * LANES]);
        UNROLL for (int i = 0; i < DEPTH; i++) s += a[i][half] * scale[m][i];
        memcpy(&sum[m][c + half * LANES], &s, sizeof s);
      }
    }
    for (; c < paired; c += PAIR) /* the last rows, fewer than DEPTH */
      for (int m = 0; m < M; m++)
        for (int i = 0; i < depth; i++) {
          vector a[2], *s = (vector *)&sum[m][c];
          load_pair(p + i * n + c, a);
          s[0] += a[0] * scale[m][i], s[1] += a[1] * scale[m][i];
        }
    for (; c < width; c++)
      for (int m = 0; m < M; m++)
        for (int i = 0; i < depth; i++) sum[m][c] += p[i * n + c] * scale[m][i];
  }
  for (int m = 0; m < M; m++) memcpy(y + m * n, sum[m], width * sizeof(float));
}

void multiply_in_out(const float *x, const float *w, const float *bias, float *y, long groups, long m, long n,
                     long k, int threads) {
  threads = groups * m * n * k < ALONE ? 1 : threads;
  long share = ((n + threads - 1) / threads + 63) / 64 * 64, columns = share < COLUMNS ? share : COLUMNS;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (long g = 0; g < groups; g++)
    for (long c = 0; c < n; c += columns)
      for (long i = 0; i < m; i += MAX_ROWS) {
        const float *xs = x + (g * m + i) * k, *ws = w + g * k * n + c, *bs = bias ? bias + g * n + c : 0;
        float *ys = y + (g * m + i) * n + c;
        long width = n - c < columns ? n - c : columns;
        WITH_ROWS(m - i, sweep, xs, ws, bs, ys, n, k, width)
      }
}
