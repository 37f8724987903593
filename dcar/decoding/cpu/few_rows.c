/* Products of a handful of rows with large weights, which is what a decoding step on a CPU consists of.
 *
 * multiply:        y[m, n] = sum_k x[m, k] w[n, k] + bias[n]                (nn.Linear)
 * multiply_in_out: y[g, m, n] = sum_k x[g, m, k] w[g, k, n] + bias[g, n]    (the stacked heads)
 *
 * Every weight is read once, at the rate of the memory, and meets all rows while it is in a register: five rows cost what one
 * costs. Sums are float32, in an order that does not depend on the number of rows. dcar/decoding/fast/cpu/native.py compiles this
 * file for float32 and, with -DBF16, for bfloat16; -DPORTABLE leaves the matrix unit (AMX) out.
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

INLINE vector load_float(const float *p) { vector v; memcpy(&v, p, sizeof v); return v; }
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

#ifdef BF16
typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINE vector load(const element *p) {
#ifdef __AVX512F__ /* in one piece: the compiler makes two of the lines below */
  return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
  halves h;
  memcpy(&h, p, sizeof h);
  words u = __builtin_convertvector(h, words) << 16;
  vector v;
  memcpy(&v, &u, sizeof v);
  return v;
#endif
}
INLINE float widen(element e) {
  uint32_t u = (uint32_t)e << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE element narrow(float f) { /* to the nearest, ties to even */
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* not a number */
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
INLINE void store(element *p, vector v) {
#ifdef __AVX512BF16__ /* the same but for numbers below 1e-38, which become 0 */
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  words u = (words)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
#ifdef __AVX512F__
  __mmask16 none = _mm512_cmpgt_epu32_mask((__m512i)(u & 0x7fffffff), _mm512_set1_epi32(0x7f800000));
  __m512i kept = _mm512_mask_mov_epi32((__m512i)rounded, none, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(kept));
#else
  words none = (words)((u & 0x7fffffff) > 0x7f800000);
  halves h = __builtin_convertvector((rounded & ~none) | (none & 0x7fc0), halves);
  memcpy(p, &h, sizeof h);
#endif
#endif
}
#else
typedef float element;
INLINE vector load(const element *p) { return load_float(p); }
INLINE float widen(element e) { return e; }
INLINE element narrow(float f) { return f; }
INLINE void store(element *p, vector v) { memcpy(p, &v, sizeof v); }
#endif

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

/* sums[m][r]: R weight rows with M rows of x, M and R constants; x holds floats where FLOATS, elements otherwise. The
 * weights are fetched `ahead` bytes before their turn. */
INLINE void products(const void *x, long x_stride, const element *w, long w_stride, long k, long ahead,
                     float sums[MAX_ROWS][4], const int M, const int R, const int FLOATS) {
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
      vector b = FLOATS ? load_float((const float *)x + at) : load((const element *)x + at);
      UNROLL for (int r = 0; r < R; r++) sum[r][m] += a[r] * b;
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    if (R == 4) {
      four s = totals(sum[0][m], sum[1][m], sum[2][m], sum[3][m]);
      memcpy(sums[m], &s, sizeof s);
    } else UNROLL for (int r = 0; r < R; r++) sums[m][r] = total(sum[r][m]);
    for (long i = c; i < k; i++) {
      float one = FLOATS ? ((const float *)x)[m * x_stride + i] : widen(((const element *)x)[m * x_stride + i]);
      for (int r = 0; r < R; r++) sums[m][r] += one * widen(w[r * w_stride + i]);
    }
  }
}

INLINE void tile(const void *x, const element *w, const element *bias, element *y, long n, long k, const int FLOATS,
                 const int M, const int R) {
  float sums[MAX_ROWS][4];
  long bytes = R * k * sizeof(element); /* of the rows: the next ones are fetched where they fit a cache */
  products(x, k, w, k, k, bytes <= NEAR ? bytes : AHEAD, sums, M, R, FLOATS);
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int r = 0; r < R; r++) y[m * n + r] = narrow(bias ? sums[m][r] + widen(bias[r]) : sums[m][r]);
}

INLINE void rows(const void *x, const element *w, const element *bias, element *y, long n, long k, long count,
                 const int FLOATS, const int M) {
  long r = 0;
  for (; r + WEIGHT_ROWS(M) <= count; r += WEIGHT_ROWS(M))
    tile(x, w + r * k, bias ? bias + r : 0, y + r, n, k, FLOATS, M, WEIGHT_ROWS(M));
  for (; r < count; r++) tile(x, w + r * k, bias ? bias + r : 0, y + r, n, k, FLOATS, M, 1);
}

/* `count` weight rows with any number of rows of x. */
static void part(const element *x, const element *w, const element *bias, element *y, long m, long n, long k, long count) {
  for (; m > 0; m -= MAX_ROWS, x += MAX_ROWS * k, y += MAX_ROWS * n) WITH_ROWS(m, rows, x, w, bias, y, n, k, count, 0)
}

#define BLOCK 16 /* weight rows that a thread takes at a time */

#ifdef BF16
/* The same for rows of x that were widened before: each is read once for every weight row. */
static void wide_part(const float *x, const element *w, const element *bias, element *y, long m, long n, long k, long count) {
  for (; m > 0; m -= MAX_ROWS, x += MAX_ROWS * k, y += MAX_ROWS * n) WITH_ROWS(m, rows, x, w, bias, y, n, k, count, 1)
}

static int multiply_wide(const element *x, const element *w, const element *bias, element *y, long m, long n, long k,
                         int threads) {
  float *wide = malloc(m * k * sizeof(float));
  if (!wide) return 0;
  for (long i = 0; i < m * k; i++) wide[i] = widen(x[i]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long r = 0; r < n; r += BLOCK)
    wide_part(wide, w + r * k, bias ? bias + r : 0, y + r, m, n, k, n - r < BLOCK ? n - r : BLOCK);
  free(wide);
  return 1;
}
#endif

static void multiply_portable(const element *x, const element *w, const element *bias, element *y, long m, long n, long k,
                              int threads) {
#ifdef BF16
  if (m > 2 && multiply_wide(x, w, bias, y, m, n, k, threads)) return;
#endif
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long r = 0; r < n; r += BLOCK)
    part(x, w + r * k, bias ? bias + r : 0, y + r, m, n, k, n - r < BLOCK ? n - r : BLOCK);
}

#if defined(BF16) && !defined(PORTABLE) && defined(__AMX_BF16__) && defined(__linux__)
/* The matrix unit: 16 weight rows are one operand as they lie, up to 16 rows of x the other one, and there are six sums. */
#include <sys/syscall.h>
#include <unistd.h>

#define TILES 6
#define SOON 8 /* blocks of 32 weights that are fetched ahead, of 16 rows each */

static int amx_allowed(void) { /* a process has to ask the kernel, once */
  static int allowed = -1;
  if (allowed < 0) allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

/* 16 x 16 numbers of 32 bits, turned over: what was a row is a column. */
INLINE void turn_over(__m512i v[16]) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 16; i += 2)
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
    v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
  }
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
    t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
    t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

#define GATHERED 2 /* as many columns are picked out one by one */

/* 16 weight rows with the rows of x, which lie as [k / 32][tile][16 pairs][column][2]. */
static void amx_part(const element *packed, const element *w, const element *bias, element *y, long m, long n, long k,
                     long columns) {
  long tiles = (m + columns - 1) / columns, step = 32 * columns, blocks = k / 32;
#define EACH_TILE(DO)                                                                                                  \
  switch (tiles) {                                                                                                     \
    case 6: DO(5) /* fall through */                                                                                   \
    case 5: DO(4) /* fall through */                                                                                   \
    case 4: DO(3) /* fall through */                                                                                   \
    case 3: DO(2) /* fall through */                                                                                   \
    case 2: DO(1) /* fall through */                                                                                   \
    default: DO(0)                                                                                                     \
  }
#define ZERO(T) _tile_zero(T);
  EACH_TILE(ZERO)
  for (long b = 0; b < blocks; b++) {
    long next = b + SOON;
    const element *soon = next < blocks ? w + 32 * next : w + 16 * k + 32 * (next - blocks);
    for (int r = 0; r < 16; r++) __builtin_prefetch(soon + r * k);
    _tile_loadd(6, w + 32 * b, 2 * k);
    const element *at = packed + b * tiles * step;
#define MULTIPLY(T) _tile_loadd(7, at + T * step, 4 * columns); _tile_dpbf16ps(T, 6, 7);
    EACH_TILE(MULTIPLY)
  }
  float sums[TILES][16][16];
#define STORE(T) _tile_stored(T, sums[T], 64);
  EACH_TILE(STORE)
  vector offset = bias ? load(bias) : (vector){0};
  if (columns <= GATHERED) {
    __m512i down = _mm512_mullo_epi32(_mm512_set1_epi32(16), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (long i = 0; i < m; i++) store(y + i * n, (vector)_mm512_i32gather_ps(down, &sums[0][0][i], 4) + offset);
    return;
  }
  for (long i = 0; i < m; i += 16) { /* what lies beside the columns of a tile is turned with them, and not stored */
    __m512i v[16];
    UNROLL for (int r = 0; r < 16; r++) v[r] = _mm512_loadu_si512(sums[i / 16][r]);
    turn_over(v);
    for (int c = 0; c < 16 && i + c < m; c++) store(y + (i + c) * n, (vector)v[c] + offset);
  }
}

static void multiply_amx(const element *x, const element *w, const element *bias, element *y, long m, long n, long k,
                         int threads) {
  long columns = m < 16 ? m : 16, tiles = (m + columns - 1) / columns, blocks = k / 32;
  element packed[blocks * tiles * 32 * columns] __attribute__((aligned(64)));
  __mmask16 all_columns = (1 << columns) - 1;
  for (long b = 0; b < blocks; b++)
    for (long t = 0; t < tiles; t++) {
      element *to = packed + (b * tiles + t) * 32 * columns;
      __m512i v[16];
      if (columns == 1) { /* as it lies */
        memcpy(to, x + 32 * b, 64);
        continue;
      }
      UNROLL for (int i = 0; i < 16; i++)
        v[i] = t * columns + i < m ? _mm512_loadu_si512(x + (t * columns + i) * k + 32 * b) : _mm512_setzero_si512();
      turn_over(v);
      UNROLL for (int p = 0; p < 16; p++) _mm512_mask_storeu_epi32(to + 2 * p * columns, all_columns, v[p]);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    struct { uint8_t palette, start, reserved[14]; uint16_t width[16]; uint8_t rows[16]; } shape, before;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int t = 0; t < 8; t++) shape.rows[t] = 16, shape.width[t] = t == 6 ? 64 : 4 * columns;
    _tile_storeconfig(&before); /* oneDNN leaves its own in place and counts on it */
    _tile_loadconfig(&shape);
#pragma omp for schedule(static)
    for (long r = 0; r < n; r += 16) {
      if (n - r >= 16) amx_part(packed, w + r * k, bias ? bias + r : 0, y + r, m, n, k, columns);
      else part(x, w + r * k, bias ? bias + r : 0, y + r, m, n, k, n - r);
    }
    if (before.palette) _tile_loadconfig(&before);
    else _tile_release();
  }
}

int matrix_unit(void) { return amx_allowed(); }

void multiply(const element *x, const element *w, const element *bias, element *y, long m, long n, long k, int threads) {
  threads = m * n * k < ALONE ? 1 : threads;
  if (m > 0 && k % 32 == 0 && m <= 16 * TILES && amx_allowed()) multiply_amx(x, w, bias, y, m, n, k, threads);
  else multiply_portable(x, w, bias, y, m, n, k, threads);
}
#else
int matrix_unit(void) { return 0; }

void multiply(const element *x, const element *w, const element *bias, element *y, long m, long n, long k, int threads) {
  threads = m * n * k < ALONE ? 1 : threads;
  multiply_portable(x, w, bias, y, m, n, k, threads);
}
#endif

#include "panels.c"

#define COLUMNS 4096
#define DEPTH 8
#define PAIR (2 * LANES)

/* PAIR weights as two vectors; in bfloat16 the even ones and the odd ones, which takes two operations. */
INLINE void load_pair(const element *p, vector *v) {
#ifdef BF16
  words u;
  memcpy(&u, p, sizeof u);
  words even = u << 16, odd = u & 0xffff0000;
  memcpy(v, &even, sizeof even);
  memcpy(v + 1, &odd, sizeof odd);
#else
  v[0] = load(p), v[1] = load(p + LANES);
#endif
}
INLINE void store_pair(element *p, const float *sums) {
#ifdef BF16
  for (int i = 0; i < LANES; i++) p[2 * i] = narrow(sums[i]), p[2 * i + 1] = narrow(sums[LANES + i]);
#else
  memcpy(p, sums, PAIR * sizeof(float));
#endif
}

/* DEPTH rows of the weights are added to the sums of up to COLUMNS columns at a time, so that they are read as they lie. */
INLINE void sweep(const element *x, const element *w, const element *bias, element *y, long n, long k, long width,
                  const int M) {
  float sum[MAX_ROWS][COLUMNS] __attribute__((aligned(64)));
  long paired = width / PAIR * PAIR, c; /* behind them columns are summed one by one */
  for (int m = 0; m < M; m++) {
    memset(sum[m], 0, width * sizeof(float));
    for (c = 0; bias && c < paired; c += PAIR) load_pair(bias + c, (vector *)&sum[m][c]);
    for (; bias && c < width; c++) sum[m][c] = widen(bias[c]);
  }
  for (long d = 0; d < k; d += DEPTH) {
    const element *p = w + d * n;
    int depth = k - d < DEPTH ? k - d : DEPTH;
    float scale[MAX_ROWS][DEPTH];
    for (int m = 0; m < M; m++)
      for (int i = 0; i < depth; i++) scale[m][i] = widen(x[m * k + d + i]);
    for (c = 0; depth == DEPTH && c < paired; c += PAIR) {
      vector a[DEPTH][2];
      UNROLL for (int i = 0; i < DEPTH; i++) {
        load_pair(p + i * n + c, a[i]);
        __builtin_prefetch(p + (DEPTH + i) * n + c);
        if (sizeof(element) == 4) __builtin_prefetch(p + (DEPTH + i) * n + c + LANES);
      }
      UNROLL for (int m = 0; m < M; m++) UNROLL for (int half = 0; half < 2; half++) {
        vector s = load_float(&sum[m][c + half * LANES]);
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
        for (int i = 0; i < depth; i++) sum[m][c] += widen(p[i * n + c]) * scale[m][i];
  }
  for (int m = 0; m < M; m++) {
    for (c = 0; c < paired; c += PAIR) store_pair(y + m * n + c, &sum[m][c]);
    for (; c < width; c++) y[m * n + c] = narrow(sum[m][c]);
  }
}

void multiply_in_out(const element *x, const element *w, const element *bias, element *y, long groups, long m, long n,
                     long k, int threads) {
  threads = groups * m * n * k < ALONE ? 1 : threads;
  long share = ((n + threads - 1) / threads + 63) / 64 * 64, columns = share < COLUMNS ? share : COLUMNS;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (long g = 0; g < groups; g++)
    for (long c = 0; c < n; c += columns)
      for (long i = 0; i < m; i += MAX_ROWS) {
        const element *xs = x + (g * m + i) * k, *ws = w + g * k * n + c, *bs = bias ? bias + g * n + c : 0;
        element *ys = y + (g * m + i) * n + c;
        long width = n - c < columns ? n - c : columns;
        WITH_ROWS(m - i, sweep, xs, ws, bs, ys, n, k, width)
      }
}
