/* A stack of Transformer layers for a few new positions (heads/layers.py), one call for all of it.
 *
 * Keys and values stay where the caller keeps them. Widths of states, heads and the feed-forward part are multiples of
 * LANES.
 */

typedef struct {
  const float *attention_norm, *attention_bias, *ffn_norm, *ffn_bias;
  Linear qkv, out, up, down;
} Layer;

typedef struct {
  const Layer *layers;
  const float *last_norm, *last_bias; /* after them */
  long count, heads;
  float epsilon;
  float *const *keys_values; /* of each layer: [rows x row_columns][2][D] */
  const float *cos, *sin; /* of a rotation: the sine is signed, see heads/layers.py */
  long angle_stride, positions, threads;
  const float *x;                  /* [positions, D] */
  float *result;                   /* likewise; absent if only keys and values are needed */
  const long *angle, *index;       /* [positions]: which rotation; row x row_columns + column of keys and values */
  long row_columns; /* of the cache */
  const long *hole_from, *hole_to; /* by row: columns that nobody sees; may be absent */
  const float *mask;               /* [positions, mask_columns], added to the scores of the first columns; if it is */
  long mask_columns;               /* absent, a position sees every column up to its own */
} Pass;

static void normalize(const float *x, const float *weight, const float *bias, float *y, long rows, long width,
                      float epsilon) {
  for (; rows > 0; rows--, x += width, y += width) {
    vector sum = all(0), squares = all(0);
    for (long c = 0; c < width; c += LANES) sum += load(x + c);
    float mean = total(sum) / width;
    for (long c = 0; c < width; c += LANES) squares += (load(x + c) - mean) * (load(x + c) - mean);
    float scale = 1 / __builtin_sqrtf(total(squares) / width + epsilon);
    for (long c = 0; c < width; c += LANES)
      store(y + c, (load(x + c) - mean) * scale * load(weight + c) + load(bias + c));
  }
}

static void add(float *x, const float *y, long count) {
  for (long c = 0; c < count; c += LANES) store(x + c, load(x + c) + load(y + c));
}

static void gelu(float *x, long count) { /* with tanh: x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
  for (long c = 0; c < count; c += LANES) {
    vector v = load(x + c), u = v * 0.7978845608f * (v * v * 0.044715f + 1.0f);
    store(x + c, v * inverse(exponential(u * -2.0f) + 1.0f));
  }
}

static void rotate(const float *x, const float *cos, const float *sin, float *y, long size, float scale) {
  float twice[2 * size];
  memcpy(twice, x, size * sizeof(float));
  memcpy(twice + size, x, size * sizeof(float));
  for (long c = 0; c < size; c += LANES)
    store(y + c, (load(twice + c) * load(cos + c) + load(twice + size / 2 + c) * load(sin + c)) * scale);
}

INLINE long row_of(const Pass *p, long i) { return p->index[i] / p->row_columns; }
INLINE long column_of(const Pass *p, long i) { return p->index[i] % p->row_columns; }

/* Rotate and scale the query of position i where it is, and put its key and its value into the cache. */
static void place(const Pass *p, long layer, long i, float *qkv, long width) {
  long size = width / p->heads;
  const float *cos = p->cos + p->angle[i] * p->angle_stride, *sin = p->sin + p->angle[i] * p->angle_stride;
  float *keys = p->keys_values[layer] + p->index[i] * 2 * width;
  memcpy(keys + width, qkv + 2 * width, width * sizeof(float));
  for (long h = 0; h < p->heads; h++, keys += size, qkv += size) {
    rotate(qkv, cos, sin, qkv, size, 1 / __builtin_sqrtf(size));
    rotate(qkv + width, cos, sin, keys, size, 1);
  }
}

#define SOON 32 /* columns of the cache that are fetched ahead */
/* scores[m][c]: the products of M queries with R keys, M and R constants. */
INLINE void dots(const float *queries, long query_stride, const float *keys, long key_stride, long size, float *scores,
                 long pad, const int M, const int R) {
  vector sum[4][MAX_ROWS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) sum[r][m] = all(0);
  for (long c = 0; c < size; c += LANES) {
    vector a[4];
    UNROLL for (int r = 0; r < R; r++) {
      a[r] = load(keys + r * key_stride + c);
      __builtin_prefetch(keys + (r + SOON) * key_stride + c);
    }
    UNROLL for (int m = 0; m < M; m++) {
      vector q = load(queries + m * query_stride + c);
      UNROLL for (int r = 0; r < R; r++) sum[r][m] += a[r] * q;
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    four s = R == 4 ? totals(&sum[0][m], MAX_ROWS) : (four){total(sum[0][m])};
    memcpy(scores + m * pad, &s, R * sizeof(float));
  }
}

/* exp(s - its maximum), in place; returns the sum. `count` is a multiple of LANES. */
static float soften(float *s, long count) {
  vector sum = all(0);
  float largest = largest_of(s, count);
  for (long c = 0; c < count; c += LANES) {
    vector v = exponential(load(s + c) - largest);
    store(s + c, v);
    sum += v;
  }
  return total(sum);
}

/* One head of M positions from `i` on, which are of one row; qkv and y are theirs. `scores` has room for M rows. */
INLINE void attend(const Pass *p, long layer, long i, long head, const float *qkv, float *y, long width, float *scores,
                   long pad, const int M) {
  long row = row_of(p, i), size = width / p->heads, stride = 2 * width, columns = p->mask_columns, c = 0;
  const float *keys = p->keys_values[layer] + row * p->row_columns * stride + head * size, *values = keys + width;
  if (!p->mask)
    for (int m = 0; m < M; m++) columns = column_of(p, i + m) + 1 > columns ? column_of(p, i + m) + 1 : columns;
  for (; c + 4 <= columns; c += 4)
    dots(qkv + head * size, 3 * width, keys + c * stride, stride, size, scores + c, pad, M, 4);
  for (; c < columns; c++)
    dots(qkv + head * size, 3 * width, keys + c * stride, stride, size, scores + c, pad, M, 1);
  float shares[MAX_ROWS];
  long padded = (columns + LANES - 1) / LANES * LANES;
  for (int m = 0; m < M; m++) {
    float *s = scores + m * pad;
    if (p->mask) for (c = 0; c < columns; c++) s[c] += p->mask[(i + m) * p->mask_columns + c];
    for (c = p->mask ? columns : column_of(p, i + m) + 1; c < padded; c++) s[c] = -__builtin_inff();
    for (c = p->hole_from ? p->hole_from[row] : columns; c < columns && c < p->hole_to[row]; c++)
      s[c] = -__builtin_inff();
    shares[m] = 1 / soften(s, padded);
  }
  for (long d = 0; d < size; d += LANES) {
    vector sum[MAX_ROWS];
    UNROLL for (int m = 0; m < M; m++) sum[m] = all(0);
    for (c = 0; c < columns; c++) {
      vector a = load(values + c * stride + d);
      __builtin_prefetch(values + (c + SOON) * stride + d);
      UNROLL for (int m = 0; m < M; m++) sum[m] += a * scores[m * pad + c];
    }
    UNROLL for (int m = 0; m < M; m++) store(y + m * width + head * size + d, sum[m] * shares[m]);
  }
}

#define ATTENDED 6 /* positions of a row that read its columns together: their sums fill the registers */

/* Queries [n, 3 D] -> y [n, D]. */
static int attention(const Pass *p, long layer, const float *qkv, float *y, long n, long width) {
  long pad = p->mask ? p->mask_columns : 0;
  for (long i = 0; i < n && !p->mask; i++) pad = column_of(p, i) + 1 > pad ? column_of(p, i) + 1 : pad;
  pad = (pad + LANES - 1) / LANES * LANES;
  float *scores = malloc(p->threads * MAX_ROWS * pad * sizeof(float));
  if (!scores) return 1;
#pragma omp parallel for collapse(2) schedule(static) num_threads(p->threads) if (p->threads > 1)
  for (long i = 0; i < n; i++)
    for (long h = 0; h < p->heads; h++) {
      if (i % ATTENDED && row_of(p, i) == row_of(p, i - 1)) continue; /* it belongs to a position before it */
      long end = i + 1;
      while (end < n && end % ATTENDED && row_of(p, end) == row_of(p, i)) end++;
      const float *queries = qkv + 3 * i * width;
      float *to = y + i * width, *room = scores + omp_get_thread_num() * MAX_ROWS * pad;
      WITH_ROWS(end - i, attend, p, layer, i, h, queries, to, width, room, pad)
    }
  free(scores);
  return 0;
}

int run_layers(const Pass *p) {
  long n = p->positions, width = p->layers->out.out, inner = p->layers->up.out, threads = p->threads;
  float *x = malloc(n * (6 * width + inner) * sizeof(float) + 1), *normed = x + n * width, *qkv = normed + n * width;
  float *y = qkv + 3 * n * width, *up = y + n * width;
  int failed = !x;
  if (!failed) memcpy(x, p->x, n * width * sizeof(float));
  for (long l = 0; l < p->count && !failed; l++) {
    const Layer *layer = p->layers + l;
    normalize(x, layer->attention_norm, layer->attention_bias, normed, n, width, p->epsilon);
    product(&layer->qkv, normed, qkv, n, threads);
    for (long i = 0; i < n; i++) place(p, l, i, qkv + 3 * i * width, width);
    if (!p->result && l == p->count - 1) break;
    failed = attention(p, l, qkv, y, n, width);
    product(&layer->out, y, normed, n, threads);
    add(x, normed, n * width);
    normalize(x, layer->ffn_norm, layer->ffn_bias, normed, n, width, p->epsilon);
    product(&layer->up, normed, up, n, threads);
    gelu(up, n * inner);
    product(&layer->down, up, normed, n, threads);
    add(x, normed, n * width);
  }
  if (p->result && !failed) normalize(x, p->last_norm, p->last_bias, p->result, n, width, p->epsilon);
  free(x);
  return failed;
}
