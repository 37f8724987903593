/* The heads behind the layers, all that are kept in one call: independent ones, and one stack that all offsets share.
 *
 * The mathematics is that of heads/multi_token.py and heads/shared.py. A logit depends on its own row alone, so neither on how
 * many rows there are nor on how many heads are asked for. layers.c includes this file.
 */

INLINE vector silu(vector v) { return v * inverse(exponential(-v) + 1.0f); }

typedef struct {
  Linear base;
  const element *blocks, *biases, *projection; /* [block][head][in][out], [block][head][out], [head][in][out] */
  long count, heads, shared;                   /* blocks; heads besides the base; whether every block is the first one */
} Heads;

/* Logits y [n, k, vocabulary] of heads 1..k from the hidden states x [n, D]; 0, or 1 where there is no memory. */
int run_heads(const Heads *h, const element *x, element *y, long n, long k, long threads) {
  long width = h->base.in, out = h->base.out, extra = k - 1, rows = extra * n;
  element *z = malloc((2 * rows * width + (rows > n ? rows : n) * out) * sizeof(element) + 1), *inner = z + rows * width,
          *logits = inner + rows * width;
  if (!z) return 1;
  product(&h->base, x, logits, n, threads);
  for (long i = 0; i < n; i++) memcpy(y + i * k * out, logits + i * out, out * sizeof(element));
  for (long g = 0; g < extra; g++) memcpy(z + g * n * width, x, n * width * sizeof(element));
  for (long b = 0; b < h->count && extra; b++) {
    long own = h->shared ? 0 : b * h->heads;
    multiply_in_out(z, h->blocks + own * width * width, h->biases + own * width, inner, extra, n, width, width, threads);
    for (long c = 0; c < rows * width; c += LANES) { /* the residual and SiLU */
      long left = rows * width - c;
      store_some(z + c, left, load_some(z + c, left, 0) + silu(load_some(inner + c, left, 0)));
    }
  }
  if (extra) multiply_in_out(z, h->projection, 0, logits, extra, n, out, width, threads);
  for (long g = 0; g < extra; g++)
    for (long i = 0; i < n; i++) memcpy(y + (i * k + g + 1) * out, logits + (g * n + i) * out, out * sizeof(element));
  free(z);
  return 0;
}

typedef struct {
  Linear base, out;               /* out without a weight: the base head is the output layer of the stack too */
  const Linear *up, *down;        /* [count] */
  const element *offset, *scale, *shift, *norm, *norm_bias; /* [heads][D], [count][heads][w] twice, [D] twice */
  long count, heads;              /* blocks; heads besides the base */
  float epsilon;
} SharedHeads;

/* As run_heads. The k - 1 rows of a hidden state go through every product together with those of the others; where the output
 * layer is the base head, the hidden states themselves do too, so that it is read once. */
int run_shared_heads(const SharedHeads *h, const element *x, element *y, long n, long k, long threads) {
  long width = h->base.in, out = h->base.out, extra = k - 1, rows = extra * n, inside = h->count ? h->up->out : 0;
  int tied = !h->out.weight;
  element *states = malloc((n + 2 * rows) * width * sizeof(element) + (rows * inside + (n + rows) * out) * sizeof(element) + 1);
  element *normed = states + n * width, *z = normed + rows * width, *inner = z + rows * width, *logits = inner + rows * inside;
  if (!states) return 1;
  memcpy(states, x, n * width * sizeof(element));
  for (long r = 0; r < rows; r++) {
    memcpy(z + r * width, x + r / extra * width, width * sizeof(element));
    add(z + r * width, h->offset + r % extra * width, width);
  }
  for (long b = 0; b < h->count && extra; b++) {
    product(h->up + b, z, inner, rows, threads);
    for (long r = 0; r < rows; r++) {
      const element *scale = h->scale + (b * h->heads + r % extra) * inside, *shift = h->shift + (b * h->heads + r % extra) * inside;
      element *to = inner + r * inside;
      for (long c = 0; c < inside; c += LANES) {
        long left = inside - c;
        vector v = load_some(to + c, left, 0) * (load_some(scale + c, left, 0) + 1.0f) + load_some(shift + c, left, 0);
        store_some(to + c, left, silu(v));
      }
    }
    product(h->down + b, inner, normed, rows, threads);
    add(z, normed, rows * width);
  }
  if (extra) normalize(z, h->norm, h->norm_bias, normed, rows, width, h->epsilon);
  product(&h->base, states, logits, tied ? n + rows : n, threads);
  if (extra && !tied) product(&h->out, normed, logits + n * out, rows, threads);
  for (long i = 0; i < n; i++) {
    memcpy(y + i * k * out, logits + i * out, out * sizeof(element));
    memcpy(y + (i * k + 1) * out, logits + (n + i * extra) * out, extra * out * sizeof(element));
  }
  free(states);
  return 0;
}
