/* Products with weights that stay in a cache, copied in panels of PANEL columns; few_rows.c includes this file. */

#define PANEL 32
#define PANEL_ROWS 12  /* rows that meet the weights together, at most: their sums fill the registers */
#define PANEL_AHEAD 64 /* rows of a panel that are fetched ahead: the cache that holds all weights is not the nearest one */
#define UNROLL_ROWS _Pragma("GCC unroll 12")

#define WITH_PANEL_ROWS(M, F, ...)                                                                                     \
  switch (M) {                                                                                                         \
    case 12: F(__VA_ARGS__, 12); break;                                                                                \
    case 11: F(__VA_ARGS__, 11); break;                                                                                \
    case 10: F(__VA_ARGS__, 10); break;                                                                                \
    case 9: F(__VA_ARGS__, 9); break;                                                                                  \
    default: WITH_ROWS(M, F, __VA_ARGS__)                                                                              \
  }

/* V vectors of columns with M rows of x, V and M constants; weights lie as [n / PANEL][k][PANEL]. */
INLINE void panel(const element *x, const element *w, const element *bias, element *y, long n, long k, long width, const int M,
                  const int V) {
  vector sum[8][PANEL_ROWS];
  UNROLL for (int v = 0; v < V; v++) UNROLL_ROWS for (int m = 0; m < M; m++) sum[v][m] = (vector){0};
  for (long d = 0; d < k; d++) {
    vector a[8];
    UNROLL for (int v = 0; v < V; v++) {
      const element *at = w + v * LANES / PANEL * k * PANEL + d * PANEL + v * LANES % PANEL;
      a[v] = load(at);
      __builtin_prefetch(at + PANEL_AHEAD * PANEL);
    }
    UNROLL_ROWS for (int m = 0; m < M; m++) {
      float s = widen(x[m * k + d]);
      UNROLL for (int v = 0; v < V; v++) sum[v][m] += a[v] * s;
    }
  }
  UNROLL_ROWS for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) {
    long c = v * LANES, left = width - c;
    if (left >= LANES) store(y + m * n + c, bias ? sum[v][m] + load(bias + c) : sum[v][m]);
    else {
      float part[LANES];
      memcpy(part, &sum[v][m], sizeof part);
      for (long i = 0; i < left; i++) y[m * n + c + i] = narrow(bias ? part[i] + widen(bias[c + i]) : part[i]);
    }
  }
}

INLINE void panels(const element *x, const element *w, const element *bias, element *y, long n, long k, long first, long last,
                   const int M) {
  long padded = (n + PANEL - 1) / PANEL * PANEL;
  for (long c = first; c < last;) {
    const element *from = w + c / PANEL * k * PANEL + c % PANEL, *b = bias ? bias + c : 0;
    if (VECTORS(M) * LANES <= PANEL || c + VECTORS(M) * LANES <= padded) {
      panel(x, from, b, y + c, n, k, n - c < VECTORS(M) * LANES ? n - c : VECTORS(M) * LANES, M, VECTORS(M));
      c += VECTORS(M) * LANES;
    } else {
      panel(x, from, b, y + c, n, k, n - c < PANEL ? n - c : PANEL, M, PANEL / LANES);
      c += PANEL;
    }
  }
}

void multiply_panels(const element *x, const element *w, const element *bias, element *y, long m, long n, long k, int threads) {
  threads = m * n * k < ALONE ? 1 : threads;
  long block = 4 * PANEL;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (long c = 0; c < n; c += block) /* four panels stay in the nearest caches until all rows have met them */
    for (long i = 0; i < m; i += PANEL_ROWS) {
      const element *xs = x + i * k;
      element *ys = y + i * n;
      long last = c + block < n ? c + block : n;
      WITH_PANEL_ROWS(m - i < PANEL_ROWS ? m - i : PANEL_ROWS, panels, xs, w, bias, ys, n, k, c, last)
    }
}
