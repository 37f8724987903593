/* Products with weights that stay in a cache, copied in panels of PANEL columns; few_rows.c includes this file. */

#define PANEL 64

/* Weights that stay in a cache, copied as [n / PANEL][k][PANEL]: V vectors of columns with M rows of x, V and M constants. */
INLINE void panel(const element *x, const element *w, const element *bias, element *y, long n, long k, long width, const int M,
                  const int V) {
  vector sum[8][MAX_ROWS];
  UNROLL for (int v = 0; v < V; v++) UNROLL for (int m = 0; m < M; m++) sum[v][m] = (vector){0};
  for (long d = 0; d < k; d++) {
    vector a[8];
    UNROLL for (int v = 0; v < V; v++) a[v] = load(w + v * LANES / PANEL * k * PANEL + d * PANEL + v * LANES % PANEL);
    UNROLL for (int m = 0; m < M; m++) {
      float s = widen(x[m * k + d]);
      UNROLL for (int v = 0; v < V; v++) sum[v][m] += a[v] * s;
    }
  }
  float sums[8 * LANES];
  for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < V; v++) memcpy(sums + v * LANES, &sum[v][m], sizeof(vector));
    for (long c = 0; c < width; c++) y[m * n + c] = narrow(bias ? sums[c] + widen(bias[c]) : sums[c]);
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

/* Rows that meet the weights together: eight at most; what is more is divided evenly by six, which the registers hold with twice
 * as many columns. */
INLINE long together(long m) {
  long parts = (m + 5) / 6;
  return m <= MAX_ROWS ? m : (m + parts - 1) / parts;
}

void multiply_panels(const element *x, const element *w, const element *bias, element *y, long m, long n, long k, int threads) {
  threads = m * n * k < ALONE ? 1 : threads;
  long block = 2 * PANEL, rows = together(m);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long c = 0; c < n; c += block) /* two panels stay in the nearest caches until all rows have met them */
    for (long i = 0; i < m; i += rows) {
      const element *xs = x + i * k;
      element *ys = y + i * n;
      long last = c + block < n ? c + block : n;
      WITH_ROWS(m - i < rows ? m - i : rows, panels, xs, w, bias, ys, n, k, c, last)
    }
}
