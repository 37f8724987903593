/* Products of a few rows with a weight: y[m, n] = sum_k x[m, k] w[n, k] + bias[n].
 *
 * The weight is a copy in panels of PANEL output columns, [n / PANEL][k][PANEL], padded with zeros. A panel is read as
 * it lies, once for up to MAX_ROWS rows, whose sums fill the registers.
 */

#define PANEL 32
#define MAX_ROWS 12
#define AHEAD 64 /* rows of a panel that are fetched ahead */
#define BLOCK (4 * PANEL) /* columns whose panels stay in the nearest caches until all rows have met them */

#if LANES == 16
#define VECTORS(M) ((M) <= 2 ? 8 : (M) <= 6 ? 4 : 2) /* of sums for each row: sums and weights fit 32 registers */
#else
#define VECTORS(M) ((M) <= 2 ? 4 : (M) <= 5 ? 2 : 1)
#endif

/* Call F with the number of rows as a constant, MAX_ROWS of them at most. */
#define WITH_ROWS(M, F, ...) \
  switch (M) { \
    case 1: F(__VA_ARGS__, 1); break; \
    case 2: F(__VA_ARGS__, 2); break; \
    case 3: F(__VA_ARGS__, 3); break; \
    case 4: F(__VA_ARGS__, 4); break; \
    case 5: F(__VA_ARGS__, 5); break; \
    case 6: F(__VA_ARGS__, 6); break; \
    case 7: F(__VA_ARGS__, 7); break; \
    case 8: F(__VA_ARGS__, 8); break; \
    case 9: F(__VA_ARGS__, 9); break; \
    case 10: F(__VA_ARGS__, 10); break; \
    case 11: F(__VA_ARGS__, 11); break; \
    default: F(__VA_ARGS__, 12); \
  }

typedef struct {
  const float *weight, *bias; /* the bias may be absent */
  long out, in;
} Linear;

/* V vectors of columns from c on with M rows of x, V and M constants. */
INLINE void panel(const Linear *l, const float *x, float *y, long c, const int M, const int V) {
  const float *w = l->weight + c / PANEL * l->in * PANEL + c % PANEL;
  vector sum[8][MAX_ROWS];
  UNROLL for (int v = 0; v < V; v++) UNROLL for (int m = 0; m < M; m++) sum[v][m] = all(0);
  for (long d = 0; d < l->in; d++) {
    vector a[8];
    UNROLL for (int v = 0; v < V; v++) {
      const float *at = w + v * LANES / PANEL * l->in * PANEL + d * PANEL + v * LANES % PANEL;
      a[v] = load(at);
      __builtin_prefetch(at + AHEAD * PANEL);
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) sum[v][m] += a[v] * x[m * l->in + d];
  }
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) {
    long at = c + v * LANES, left = l->out - at;
    float *to = y + m * l->out + at;
    if (left >= LANES) store(to, l->bias ? sum[v][m] + load(l->bias + at) : sum[v][m]);
    else for (long i = 0; i < left; i++) to[i] = sum[v][m][i] + (l->bias ? l->bias[at + i] : 0);
  }
}

INLINE void panels(const Linear *l, const float *x, float *y, long first, long last, const int M) {
  long padded = (l->out + PANEL - 1) / PANEL * PANEL;
  for (long c = first; c < last;) {
    if (VECTORS(M) * LANES <= PANEL || c + VECTORS(M) * LANES <= padded) {
      panel(l, x, y, c, M, VECTORS(M));
      c += VECTORS(M) * LANES;
    } else {
      panel(l, x, y, c, M, PANEL / LANES);
      c += PANEL;
    }
  }
}

static void product(const Linear *l, const float *x, float *y, long rows, long threads) {
  threads = rows * l->out * l->in < ALONE ? 1 : threads;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (long c = 0; c < l->out; c += BLOCK)
    for (long i = 0; i < rows; i += MAX_ROWS) {
      const float *from = x + i * l->in;
      float *to = y + i * l->out;
      long last = c + BLOCK < l->out ? c + BLOCK : l->out;
      WITH_ROWS(rows - i, panels, l, from, to, c, last)
    }
}
