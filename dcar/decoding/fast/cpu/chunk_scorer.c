/* How well the tokens of a chunk go together: a GRU over at most K tokens, whole chunks in one call.
 *
 * The mathematics is that of heads/chunk_scorer.py, with the embedding folded into the layer behind it. A chunk's result does not
 * depend on the others. layers.c includes this file, for float32; widths are multiples of the lanes.
 */

INLINE vector logistic(vector v) { return inverse(exponential(-v) + 1.0f); }

INLINE vector hyperbolic_tangent(vector v) { /* to 3e-7 of the value; near 0 by Cephes' polynomial, where 1 - 2 / … cancels */
  vector square = v * v, p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return choose(square < 0.390625f, p * square * v + v, 1.0f - 2.0f * inverse(exponential(v * 2.0f) + 1.0f));
}

typedef struct {
  const element *token, *seen, *offset; /* [ids][width] with all biases before SiLU, [features][width], [K][width] */
  Linear context;                       /* of the hidden state: what is added before SiLU, and the start; [2 width, D] */
  Linear input, hidden;                 /* of the GRU: reset, update, new; [3 width, width] */
  Linear inner;
  const element *output; /* [width] */
  float output_bias;
  long ids, features, width;
} ChunkScorer;

/* Inputs x [n, rows, width] of the GRU. */
static void read_tokens(const ChunkScorer *c, const element *context, const long *tokens, const element *candidates, element *x,
                        long rows, long n) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < n; j++) {
      const element *token = c->token + tokens[i * n + j] * c->width, *f = candidates + (i * n + j) * c->features;
      for (long d = 0; d < c->width; d += LANES) {
        vector v = load(token + d) + load(context + 2 * i * c->width + d) + load(c->offset + j * c->width + d);
        for (long k = 0; k < c->features; k++) v += load(c->seen + k * c->width + d) * f[k];
        store(x + (j * rows + i) * c->width + d, silu(v));
      }
    }
}

/* The next states from the states before, all [rows, width], and what input and states make of the gates [rows, 3 width]. */
static void gates(const element *input, const element *own, const element *before, element *states, long rows, long width) {
  for (long i = 0; i < rows; i++, input += 3 * width, own += 3 * width)
    for (long d = 0; d < width; d += LANES) {
      vector reset = logistic(load(input + d) + load(own + d)), h = load(before + i * width + d);
      vector update = logistic(load(input + width + d) + load(own + width + d));
      vector new = hyperbolic_tangent(load(input + 2 * width + d) + reset * load(own + 2 * width + d));
      store(states + i * width + d, new + update * (h - new));
    }
}

/* What each of tokens [rows, n] adds to its chunk, `added` [rows, n], 0 behind the end of speech (the last id): hidden states
 * [rows, D], candidates [rows, n, features]. 0, 1 where there is no memory, or 2 for a token that is no id. */
int run_chunk_scorer(const ChunkScorer *c, const element *hidden, const long *tokens, const element *candidates, element *added,
                  long rows, long n, long threads) {
  long width = c->width, all_rows = rows * n;
  for (long i = 0; i < all_rows; i++)
    if (tokens[i] < 0 || tokens[i] >= c->ids) return 2;
  element *context = malloc(((6 * rows + 5 * all_rows) * width) * sizeof(element) + 1), *start = context + 2 * rows * width,
          *own = start + rows * width, *x = own + 3 * rows * width, *input = x + all_rows * width, *states = input + 3 * all_rows * width;
  if (!context) return 1;
  product(&c->context, hidden, context, rows, threads);
  read_tokens(c, context, tokens, candidates, x, rows, n);
  for (long i = 0; i < rows; i++)
    for (long d = 0; d < width; d += LANES)
      store(start + i * width + d, hyperbolic_tangent(load(context + (2 * i + 1) * width + d)));
  product(&c->input, x, input, all_rows, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > PANEL_ROWS)
  for (long first = 0; first < rows; first += PANEL_ROWS) /* step by step only rows that meet the weights together */
    for (long j = 0, some = rows - first < PANEL_ROWS ? rows - first : PANEL_ROWS; j < n; j++) {
      long at = j * rows + first;
      const element *before = (j ? states + (at - rows) * width : start + first * width);
      product(&c->hidden, before, own + 3 * first * width, some, 1);
      gates(input + 3 * at * width, own + 3 * first * width, before, states + at * width, some, width);
    }
  product(&c->inner, states, x, all_rows, threads);
  for (long i = 0; i < rows; i++)
    for (long j = 0, ended = 0; j < n; j++) {
      vector sum = all(0);
      for (long d = 0; d < width && !ended; d += LANES) sum += silu(load(x + (j * rows + i) * width + d)) * load(c->output + d);
      added[i * n + j] = ended ? 0 : total(sum) + c->output_bias;
      ended |= tokens[i * n + j] == c->ids - 1;
    }
  free(context);
  return 0;
}
