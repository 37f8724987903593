/* How well the tokens of a chunk go together: a GRU over at most K tokens (heads/chunk_scorer.py), whole chunks in one
 * call, with the embedding folded into the layer after it. Widths are multiples of LANES. */

INLINE vector hyperbolic_tangent(vector v) { /* to 3e-7; near 0 by Cephes' polynomial, where 1 - 2 / … cancels */
  vector square = v * v, p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return choose(square < 0.390625f, p * square * v + v, 1.0f - 2.0f * inverse(exponential(v * 2.0f) + 1.0f));
}

typedef struct {
  const float *token, *seen, *offset; /* [ids][width] with all biases before SiLU, [features][width], [K][width] */
  Linear context;                     /* of the hidden state: what is added before SiLU, and the start; [2 width, D] */
  Linear input, hidden;               /* of the GRU: reset, update, new; [3 width, width] */
  Linear inner;
  const float *output; /* [width] */
  float output_bias;
  long ids, features, width;
} ChunkScorer;

/* Inputs x [.., width] of the GRU, one for all chunks of a hidden state that have the same token at the same place, and
 * `which` [n, rows] of them; returns how many there are. */
static long read_tokens(const ChunkScorer *c, const float *context, const long *tokens, const float *features,
                        float *x, long *which, long rows, long several, long n, long stride) {
  long count = 0;
  for (long j = 0; j < n; j++)
    for (long i = 0; i < rows; i++) {
      long id = tokens[i * n + j], first = i / several * several;
      while (tokens[first * n + j] != id) first++;
      which[j * rows + i] = first < i ? which[j * rows + first] : count;
      if (first < i) continue;
      const float *token = c->token + id * c->width, *seen = features + (i * n + j) * stride;
      const float *of = context + 2 * (i / several) * c->width, *offset = c->offset + j * c->width;
      for (long d = 0; d < c->width; d += LANES) {
        vector v = load(token + d) + load(of + d) + load(offset + d);
        for (long k = 0; k < c->features; k++) v += load(c->seen + k * c->width + d) * seen[k];
        store(x + count * c->width + d, silu(v));
      }
      count++;
    }
  return count;
}

/* The next states from the states before, all [rows, width], and what inputs, `which` [rows] of them, and states make
 * of the gates [rows, 3 width]. */
static void gates(const float *inputs, const long *which, const float *own, const float *before, float *states,
                  long rows, long width) {
  for (long i = 0; i < rows; i++, own += 3 * width) {
    const float *input = inputs + 3 * width * which[i];
    for (long d = 0; d < width; d += LANES) {
      vector reset = logistic(load(input + d) + load(own + d)), h = load(before + i * width + d);
      vector update = logistic(load(input + width + d) + load(own + width + d));
      vector new = hyperbolic_tangent(load(input + 2 * width + d) + reset * load(own + 2 * width + d));
      store(states + i * width + d, new + update * (h - new));
    }
  }
}

/* What each of tokens [rows, n] adds to its chunk, 0 after the end of speech (the last id): hidden states
 * [rows / several, D], each of which `several` chunks follow, and features [rows, n, stride] of the tokens, to which it
 * is written after those that are read. */
static int score_chunks(const ChunkScorer *c, const float *hidden, const long *tokens, float *features, long rows,
                        long several, long n, long stride, long threads) {
  long width = c->width, all_rows = rows * n, groups = rows / several;
  long *which = malloc(all_rows * sizeof(long) + (2 * groups + 4 * rows + 5 * all_rows) * width * sizeof(float) + 1);
  float *context = (float *)(which + all_rows), *start = context + 2 * groups * width, *own = start + rows * width;
  float *x = own + 3 * rows * width, *input = x + all_rows * width, *states = input + 3 * all_rows * width;
  if (!which) return 1;
  product(&c->context, hidden, context, groups, threads);
  long inputs = read_tokens(c, context, tokens, features, x, which, rows, several, n, stride);
  for (long i = 0; i < rows; i++)
    for (long d = 0; d < width; d += LANES)
      store(start + i * width + d, hyperbolic_tangent(load(context + (2 * (i / several) + 1) * width + d)));
  product(&c->input, x, input, inputs, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > MAX_ROWS)
  for (long first = 0; first < rows; first += MAX_ROWS) /* step by step only rows that meet the weights together */
    for (long j = 0, some = rows - first < MAX_ROWS ? rows - first : MAX_ROWS; j < n; j++) {
      long at = j * rows + first;
      const float *before = j ? states + (at - rows) * width : start + first * width;
      product(&c->hidden, before, own + 3 * first * width, some, 1);
      gates(input, which + at, own + 3 * first * width, before, states + at * width, some, width);
    }
  product(&c->inner, states, x, all_rows, threads);
  for (long i = 0; i < rows; i++)
    for (long j = 0, ended = 0; j < n; j++) {
      vector sum = all(0);
      for (long d = 0; d < width && !ended; d += LANES)
        sum += silu(load(x + (j * rows + i) * width + d)) * load(c->output + d);
      features[(i * n + j) * stride + c->features] = ended ? 0 : total(sum) + c->output_bias;
      ended |= tokens[i * n + j] == c->ids - 1;
    }
  free(which);
  return 0;
}
