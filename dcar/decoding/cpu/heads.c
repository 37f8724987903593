/* Multi-token heads that share one stack (heads/shared.py), or a base head alone: all that are kept in one call. Widths
 * of hidden states and of blocks are multiples of LANES. */

typedef struct {
  Linear base, out;
  const Linear *up, *down; /* [count] */
  const float *offset, *scale, *shift, *norm, *norm_bias; /* [heads][D], [count][heads][w] twice, [D] twice */
  long count, heads;       /* blocks; heads besides the base */
  float epsilon;
} Heads;

/* Logits y [n, k, vocabulary] of heads 1..k from the hidden states x [n, D]. The k - 1 rows of a hidden state go
 * through every product together with those of the others. */
int run_heads(const Heads *h, const float *x, float *y, long n, long k, long threads) {
  long width = h->base.in, out = h->base.out, extra = k - 1, rows = extra * n, inside = h->count ? h->up->out : 0;
  float *states = malloc(((n + 2 * rows) * width + rows * inside + (n + rows) * out) * sizeof(float) + 1);
  float *normed = states + n * width, *z = normed + rows * width, *inner = z + rows * width;
  float *logits = inner + rows * inside;
  if (!states) return 1;
  memcpy(states, x, n * width * sizeof(float));
  for (long r = 0; r < rows; r++) {
    memcpy(z + r * width, x + r / extra * width, width * sizeof(float));
    add(z + r * width, h->offset + r % extra * width, width);
  }
  for (long b = 0; b < h->count && extra; b++) {
    product(h->up + b, z, inner, rows, threads);
    for (long r = 0; r < rows; r++) {
      long head = (b * h->heads + r % extra) * inside;
      float *to = inner + r * inside;
      for (long c = 0; c < inside; c += LANES) store(to + c, load(to + c) * (load(h->scale + head + c) + 1.0f));
      for (long c = 0; c < inside; c += LANES) store(to + c, silu(load(to + c) + load(h->shift + head + c)));
    }
    product(h->down + b, inner, normed, rows, threads);
    add(z, normed, rows * width);
  }
  if (extra) normalize(z, h->norm, h->norm_bias, normed, rows, width, h->epsilon);
  product(&h->base, states, logits, n, threads);
  if (extra) product(&h->out, normed, logits + n * out, rows, threads);
  for (long i = 0; i < n; i++) {
    memcpy(y + i * k * out, logits + i * out, out * sizeof(float));
    memcpy(y + (i * k + 1) * out, logits + (n + i * extra) * out, extra * out * sizeof(float));
  }
  free(states);
  return 0;
}
