/* Transformer layers for a handful of new positions, one call for a whole stack; heads.c has the heads behind them.
 *
 * The mathematics is that of heads/layers.py. A step of a small model consists of hundreds of operators that each take longer
 * to be called than to compute, and in a large one what stands between the products lets the memory wait; here neither is so.
 * Keys and values stay where the caller keeps them, in any layout with contiguous heads. Attention reads the columns of all
 * heads in the order in which they lie. Products are those of few_rows.c; a position's result does not depend on the others.
 */
#include <stdlib.h>

#include "few_rows.c"

typedef struct {
  const element *weight, *bias;
  long out, in, panels; /* panels: the weight is a copy in panels, see multiply_panels */
} Linear;

typedef struct {
  const element *attention_norm, *attention_bias, *ffn_norm, *ffn_bias;
  Linear qkv, out, up, down;
} Layer;

typedef struct {
  const element *first_norm, *first_bias; /* before the layers; may be absent, as the product behind it */
  Linear first;
  const Layer *layers;
  const element *last_norm, *last_bias;
  Linear last; /* may be absent */
  long count, heads;
  float epsilon;
  element *keys, *values; /* of layer 0, row 0, column 0, head 0 */
  long layer_stride, row_stride, column_stride, head_stride;
  const element *cos, *sin; /* of a rotation: sine signed, see heads/layers.py */
  long angle_stride;
  long positions;
  element *x, *result;               /* [positions, D], which is overwritten; where the result goes, perhaps x */
  const long *angle, *index;         /* [positions]: which rotation; row x row_columns + column of keys and values */
  long row_columns;
  const long *hole_from, *hole_to;   /* by row: columns that nobody sees; may be absent */
  const element *mask;               /* [positions, mask_columns], added to the scores of the first columns; where it is */
  long mask_columns;                 /* absent, a position sees every column up to its own */
  const long *kept;                  /* [kept_count]: only these go on behind the cache of the last layer; may be absent */
  long kept_count;
  long threads;
} Pass;

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE vector all(float f) { return (vector){0} + f; }
INLINE vector choose(ints which, vector a, vector b) { return (vector)(((ints)a & which) | ((ints)b & ~which)); }

INLINE vector exponential(vector x) { /* to 2e-7 of the value; 0 below -87 */
#ifdef __AVX512F__ /* the same bits: the compiler makes a dozen instructions of the choices */
  __mmask16 large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87), _CMP_NLT_UQ);
  x = (vector)_mm512_min_ps(_mm512_set1_ps(88), _mm512_max_ps(_mm512_set1_ps(-87), (__m512)x)); /* NaN stays */
#else
  ints small = x < -87.0f;
  x = choose(small, all(-87), choose(x > 88.0f, all(88), x));
#endif
  vector n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded */
  vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  return (vector)_mm512_maskz_scalef_ps(large, (__m512)p, (__m512)n);
#else
  ints power = (__builtin_convertvector(n, ints) + 127) << 23;
  return choose(small, all(0), p * (vector)power);
#endif
}

INLINE vector inverse(vector v) {
#ifdef __AVX512F__
  vector r = (vector)_mm512_rcp14_ps((__m512)v); /* to 2^-14, then doubled */
  return r * (2.0f - v * r);
#else
  return 1.0f / v;
#endif
}

/* The first `left` lanes; the others are `rest`, or stay as they are in memory. */
#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE vector load_some(const element *p, long left, float rest) {
  if (left >= LANES) return load(p);
  __mmask16 some = (1 << left) - 1;
#ifdef BF16
  __m512 v = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16);
  return (vector)_mm512_mask_mov_ps((__m512)all(rest), some, v);
#else
  return (vector)_mm512_mask_loadu_ps((__m512)all(rest), some, p);
#endif
}
INLINE void store_some(element *p, long left, vector v) {
  if (left >= LANES) {
    store(p, v);
    return;
  }
  __mmask16 some = (1 << left) - 1;
#ifdef BF16
  __m256i rounded;
  store((element *)&rounded, v);
  _mm256_mask_storeu_epi16(p, some, rounded);
#else
  _mm512_mask_storeu_ps(p, some, (__m512)v);
#endif
}
#else
static __attribute__((noinline)) void load_part(const element *p, long left, float rest, float *part) {
  for (long i = 0; i < LANES; i++) part[i] = i < left ? widen(p[i]) : rest;
}
static __attribute__((noinline)) void store_part(element *p, long left, const float *part) {
  for (long i = 0; i < left; i++) p[i] = narrow(part[i]);
}
INLINE vector load_some(const element *p, long left, float rest) {
  if (left >= LANES) return load(p);
  float part[LANES];
  load_part(p, left, rest, part);
  return load_float(part);
}
INLINE void store_some(element *p, long left, vector v) {
  if (left >= LANES) store(p, v);
  else store_part(p, left, (const float *)&v);
}
#endif

static void normalize(const element *x, const element *weight, const element *bias, element *y, long n, long d, float epsilon) {
  for (; n > 0; n--, x += d, y += d) {
    vector sum = all(0), squares = all(0);
    for (long c = 0; c < d; c += LANES) sum += load_some(x + c, d - c, 0);
    float mean = total(sum) / d;
    for (long c = 0; c < d; c += LANES) {
      vector v = load_some(x + c, d - c, mean) - mean;
      squares += v * v;
    }
    float scale = 1 / __builtin_sqrtf(total(squares) / d + epsilon);
    for (long c = 0; c < d; c += LANES)
      store_some(y + c, d - c, (load_some(x + c, d - c, 0) - mean) * scale * load_some(weight + c, d - c, 0) +
                                   load_some(bias + c, d - c, 0));
  }
}

static void add(element *x, const element *y, long count) {
  for (long c = 0; c < count; c += LANES)
    store_some(x + c, count - c, load_some(x + c, count - c, 0) + load_some(y + c, count - c, 0));
}

static void gelu(element *x, long count) { /* with tanh: x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
  for (long c = 0; c < count; c += LANES) {
    vector v = load_some(x + c, count - c, 0), u = v * 0.7978845608f * (v * v * 0.044715f + 1.0f);
    store_some(x + c, count - c, v * inverse(exponential(u * -2.0f) + 1.0f));
  }
}

INLINE void turn(const element *x, const element *cos, const element *sin, element *y, long half) {
  for (long c = 0; c < half; c += LANES) {
    long left = half - c, d = c + half;
    vector a = load_some(x + c, left, 0), b = load_some(x + d, left, 0);
    store_some(y + c, left, a * load_some(cos + c, left, 0) + b * load_some(sin + c, left, 0));
    store_some(y + d, left, b * load_some(cos + d, left, 0) + a * load_some(sin + d, left, 0));
  }
}

INLINE long row_of(const Pass *p, long i) { return p->index[i] / p->row_columns; }
INLINE long column_of(const Pass *p, long i) { return p->index[i] % p->row_columns; }

/* Rotate the query of position i where it is, and put its key and its value into the cache. */
static void place(const Pass *p, long layer, long i, element *qkv, long width) {
  long size = width / p->heads;
  const element *cos = p->cos + p->angle[i] * p->angle_stride, *sin = p->sin + p->angle[i] * p->angle_stride;
  long at = layer * p->layer_stride + row_of(p, i) * p->row_stride + column_of(p, i) * p->column_stride;
  for (long h = 0; h < p->heads; h++, at += p->head_stride, qkv += size) {
    turn(qkv, cos, sin, qkv, size / 2);
    turn(qkv + width, cos, sin, p->keys + at, size / 2);
    memcpy(p->values + at, qkv + 2 * width, size * sizeof(element));
  }
}

#define VALUES 8 /* columns that are weighed at a time */

/* `count` columns of values, weighed by M rows of `p`, are added to the sums of one head. */
INLINE void weigh(const float *p, long pad, const element *v, long stride, float *sums, long size, long room, long count,
                  const int M) {
  for (long c = 0; c < size; c += LANES) {
    vector sum[MAX_ROWS];
    UNROLL for (int m = 0; m < M; m++) sum[m] = load_float(sums + m * room + c);
    for (long j = 0; j < count; j++) {
      vector a = load_some(v + j * stride + c, size - c, 0);
      __builtin_prefetch(v + (j + VALUES) * stride + c);
      UNROLL for (int m = 0; m < M; m++) sum[m] += a * p[m * pad + j];
    }
    UNROLL for (int m = 0; m < M; m++) memcpy(sums + m * room + c, &sum[m], sizeof sum[m]);
  }
}

/* The largest of floats, `pad` of them, a multiple of LANES. */
static float most_of(const float *row, long pad) {
  vector most = load_float(row);
  for (long c = LANES; c < pad; c += LANES) {
    vector v = load_float(row + c);
    most = choose(v > most, v, most);
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

/* exp(s - its maximum), in place; returns the sum. `pad` is a multiple of LANES. */
static float soften(float *s, long pad) {
  vector sum = all(0);
  float largest = most_of(s, pad);
  for (long c = 0; c < pad; c += LANES) {
    vector v = exponential(load_float(s + c) - largest);
    memcpy(s + c, &v, sizeof v);
    sum += v;
  }
  return total(sum);
}

/* Heads first..last of M positions from `i` on, which are of one row. */
INLINE int attend(const Pass *p, long layer, long i, const element *qkv, element *y, long width, long first, long last,
                  const int M) {
  long row = row_of(p, i), size = width / p->heads, room = (size + LANES - 1) / LANES * LANES, heads = last - first;
  long from = p->hole_from ? p->hole_from[row] : 0, to = p->hole_to ? p->hole_to[row] : 0, start = 0, end = p->mask_columns;
  if (!p->mask) {
    for (int m = 0; m < M; m++) {
      long seen = column_of(p, i + m) + 1;
      end = seen > end ? seen : end;
    }
    if (from == 0) start = to;
  }
  long columns = end - start, pad = (columns + LANES - 1) / LANES * LANES;
  float *scores = malloc((heads * M * (pad + 2 * room)) * sizeof(float)), *sums = scores + heads * M * pad;
  float *queries = sums + heads * M * room;
  if (!scores) return 1;
  float scale = 1 / __builtin_sqrtf(size);
  for (int m = 0; m < M; m++)
    for (long h = 0; h < heads; h++)
      for (long c = 0; c < size; c += LANES) {
        vector q = load_some(qkv + 3 * m * width + (first + h) * size + c, size - c, 0) * scale;
        memcpy(queries + (h * M + m) * room + c, &q, sizeof q);
      }
  long base = layer * p->layer_stride + row * p->row_stride, stride = p->column_stride;
  const element *keys = p->keys + base, *values = p->values + base;
  /* Whatever lies side by side is read together: all heads of some columns, or all columns of a head. */
  long block = stride > p->head_stride ? VALUES : columns;

  for (long b = start; b < end; b += block)
    for (long h = first; h < last; h++) {
      const element *k = keys + h * p->head_stride;
      const float *q = queries + (h - first) * M * room;
      float *s = scores + (h - first) * M * pad;
      long c = b, until = b + block < end ? b + block : end;
#define DOTS(R)                                                                                                        \
  for (; c + R <= until; c += R) {                                                                                     \
    float dots[MAX_ROWS][4];                                                                                           \
    products(q, room, k + c * stride, stride, size, VALUES * stride * sizeof(element), dots, M, R, 1);                 \
    UNROLL for (int m = 0; m < M; m++) memcpy(s + m * pad + c - start, dots[m], R * sizeof(float));                    \
  }
      DOTS(4)
      DOTS(1)
    }

  memset(sums, 0, heads * M * room * sizeof(float));
  float shares[heads * M];
  for (long h = 0; h < heads; h++)
    for (int m = 0; m < M; m++) {
      float *s = scores + (h * M + m) * pad;
      if (p->mask)
        for (long c = 0; c < columns; c++) s[c] += widen(p->mask[(i + m) * p->mask_columns + c]);
      else
        for (long c = column_of(p, i + m) + 1 - start; c < columns; c++) s[c] = -__builtin_inff();
      for (long c = from; c < to; c++)
        if (c >= start && c < end) s[c - start] = -__builtin_inff();
      for (long c = columns; c < pad; c++) s[c] = -__builtin_inff();
      shares[h * M + m] = 1 / soften(s, pad);
    }
  for (long b = start; b < end; b += block)
    for (long h = first; h < last; h++)
      for (long c = b; c < b + block && c < end; c += VALUES) {
        long count = end - c < VALUES ? end - c : VALUES;
        weigh(scores + (h - first) * M * pad + c - start, pad, values + c * stride + h * p->head_stride, stride,
              sums + (h - first) * M * room, size, room, count, M);
      }
  for (int m = 0; m < M; m++)
    for (long h = 0; h < heads; h++)
      for (long c = 0; c < size; c += LANES) {
        vector v = load_float(sums + (h * M + m) * room + c) * shares[h * M + m];
        store_some(y + m * width + (first + h) * size + c, size - c, v);
      }
  free(scores);
  return 0;
}

#define SCORES (1 << 17) /* as many fit the caches */

/* Queries [positions, 3 D] -> y [positions, D]. */
static int attention(const Pass *p, long layer, const element *qkv, element *y, long n, long width) {
  long longest = p->mask_columns, groups = 0, *group = malloc((n + 1) * sizeof(long));
  if (!group) return 1;
  for (long i = 0; i < n; i++) {
    if (!i || row_of(p, i) != row_of(p, i - 1) || i - group[groups - 1] == MAX_ROWS) group[groups++] = i;
    long seen = column_of(p, i) + 1;
    longest = seen > longest ? seen : longest;
  }
  group[groups] = n;
  long heads = (p->heads + p->threads - 1) / p->threads, fit = SCORES / (MAX_ROWS * longest);
  heads = fit < 1 ? 1 : fit < heads ? fit : heads;
  int failed = 0;
#pragma omp parallel for collapse(2) schedule(static) num_threads(p->threads) if (p->threads > 1) reduction(| : failed)
  for (long g = 0; g < groups; g++)
    for (long h = 0; h < p->heads; h += heads) {
      long i = group[g], last = h + heads < p->heads ? h + heads : p->heads;
      const element *q = qkv + 3 * i * width;
      element *to = y + i * width;
      WITH_ROWS(group[g + 1] - i, failed |= attend, p, layer, i, q, to, width, h, last)
    }
  free(group);
  return failed;
}

static void product(const Linear *l, const element *x, element *y, long n, long threads) {
  if (l->panels) multiply_panels(x, l->weight, l->bias, y, n, l->out, l->in, threads);
  else multiply(x, l->weight, l->bias, y, n, l->out, l->in, threads);
}

/* 0, or 1 where there is no memory. */
int run_layers(const Pass *given) {
  Pass p = *given;
  long n = p.positions, width = p.layers->out.out, inner = p.layers->up.out, entry = p.first.weight ? p.first.in : width;
  long most = p.kept && p.kept_count > n ? p.kept_count : n;
  element *normed = malloc(most * (entry + 10 * width + inner) * sizeof(element) + 1), *qkv = normed + most * (entry + width),
          *kept = qkv + 3 * most * width, *y = kept + 3 * most * width, *x = y + most * width, *kept_x = x + most * width,
          *up = kept_x + most * width;
  long *index = malloc(most * sizeof(long) + 1);
  int failed = !normed || !index;
  if (p.first_norm && !failed) {
    normalize(p.x, p.first_norm, p.first_bias, p.first.weight ? normed : x, n, entry, p.epsilon);
    if (p.first.weight) product(&p.first, normed, x, n, p.threads);
  } else x = p.x;
  for (long l = 0; l < p.count && !failed; l++) {
    const Layer *layer = p.layers + l;
    normalize(x, layer->attention_norm, layer->attention_bias, normed, n, width, p.epsilon);
    product(&layer->qkv, normed, qkv, n, p.threads);
    for (long i = 0; i < n; i++) place(&p, l, i, qkv + 3 * i * width, width);
    if (p.kept && l == p.count - 1) {
      n = p.kept_count;
      for (long i = 0; i < n; i++) {
        long k = p.kept[i];
        index[i] = p.index[k];
        memcpy(kept_x + i * width, x + k * width, width * sizeof(element));
        memcpy(kept + 3 * i * width, qkv + 3 * k * width, 3 * width * sizeof(element));
      }
      p.index = index, x = kept_x, qkv = kept;
    }
    failed = attention(&p, l, qkv, y, n, width);
    product(&layer->out, y, normed, n, p.threads);
    add(x, normed, n * width);
    normalize(x, layer->ffn_norm, layer->ffn_bias, normed, n, width, p.epsilon);
    product(&layer->up, normed, up, n, p.threads);
    gelu(up, n * inner);
    product(&layer->down, up, normed, n, p.threads);
    add(x, normed, n * width);
  }
  if (!failed) {
    normalize(x, p.last_norm, p.last_bias, p.last.weight ? normed : p.result, n, width, p.epsilon);
    if (p.last.weight) product(&p.last, normed, p.result, n, p.threads);
  }
  free(index);
  free(normed);
  return failed;
}

#include "heads.c"
#include "distributions.c"
#ifndef BF16
#include "chunk_scorer.c"
#endif
