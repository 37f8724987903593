/* How well the tokens of a chunk go together (heads/chunk_scorer.py): all tokens of all chunks in one product, with the
 * embedding folded into the layer after it. Widths are multiples of LANES. */

typedef struct {
  const float *tokens, *seen; /* [window][ids][width] and [window][features][width], the latest token last */
  const float *offset;        /* [K][width] */
  Linear state, inner;
  const float *output; /* [width] */
  float output_bias;
  long ids, features, width, window;
} ChunkScorer;

/* What each of tokens [rows, n] adds to its chunk, 0 after the end of speech (the last id): hidden states
 * [rows / several, D], each of which `several` chunks follow, and features [rows, n, stride] of the tokens, to which it
 * is written after those that are read. */
static int score_chunks(const ChunkScorer *c, const float *hidden, const long *tokens, float *features, long rows,
                        long several, long n, long stride, long threads) {
  long width = c->width, all_rows = rows * n, groups = rows / several;
  float *state = malloc((groups + 2 * all_rows) * width * sizeof(float) + 1);
  float *x = state + groups * width, *y = x + all_rows * width;
  if (!state) return 1;
  product(&c->state, hidden, state, groups, threads);
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < n; j++) {
      const float *of = state + i / several * width, *offset = c->offset + j * width;
      long before = c->window - 1, first = j < before ? before - j : 0; /* before the chunk there is nothing */
      for (long d = 0; d < width; d += LANES) {
        vector v = load(of + d) + load(offset + d);
        for (long w = first; w < c->window; w++) {
          long at = i * n + j - before + w;
          v += load(c->tokens + (w * c->ids + tokens[at]) * width + d);
          for (long f = 0; f < c->features; f++)
            v += load(c->seen + (w * c->features + f) * width + d) * features[at * stride + f];
        }
        store(x + (i * n + j) * width + d, silu(v));
      }
    }
  product(&c->inner, x, y, all_rows, threads);
  for (long i = 0; i < rows; i++)
    for (long j = 0, ended = 0; j < n; j++) {
      vector sum = all(0);
      for (long d = 0; d < width && !ended; d += LANES)
        sum += silu(load(y + (i * n + j) * width + d)) * load(c->output + d);
      features[(i * n + j) * stride + c->features] = ended ? 0 : total(sum) + c->output_bias;
      ended |= tokens[i * n + j] == c->ids - 1;
    }
  free(state);
  return 0;
}
