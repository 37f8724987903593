/* The vocoder between its matrix products and Fourier transforms (dcar/vocoder/operations.py). Rows are independent.
 * Widths of blocks are multiples of LANES; the number of bins is at least LANES. */

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* Floats from place i of an array of float32 or bfloat16, and back. */
INLINE vector load_as(const void *x, long i, long bfloat16) {
  halves h;
  if (!bfloat16) return load((const float *)x + i);
  memcpy(&h, (const uint16_t *)x + i, sizeof h);
  return (vector)(__builtin_convertvector(h, words) << 16);
}

INLINE void store_as(void *x, long i, vector v, long bfloat16) { /* rounded to the nearest, or to the even */
  words w = (words)v;
  halves h = __builtin_convertvector((w + 0x7fff + (w >> 16 & 1)) >> 16, halves);
  if (bfloat16) memcpy((uint16_t *)x + i, &h, sizeof h);
  else store((float *)x + i, v);
}

/* sin(2 pi t), to 1e-7 for |t| up to 1; above, to the rounding of t. */
INLINE vector sine(vector t) {
  vector r = t - ((t + 12582912.0f) - 12582912.0f); /* -1/2..1/2 */
  r = choose(r > 0.25f, 0.5f - r, choose(r < -0.25f, -0.5f - r, r));
  vector x = r * 6.28318531f, y = x * x, p = y * -2.50521084e-8f + 2.75573192e-6f; /* x - x^3 / 3! + ... - x^11 / 11! */
  p = p * y - 1.98412698e-4f;
  p = p * y + 8.33333333e-3f;
  p = p * y - 1.66666667e-1f;
  return p * y * x + x;
}

/* Depth-wise convolution and layer norm: x [rows + (count - 1) dilation, width] with taps [count, width] to y
 * [rows, width]. */
void run_convolution(const float *x, const float *taps, const float *bias, const float *weight, const float *shift,
                     void *y, long rows, long width, long count, long dilation, float epsilon, long bfloat16,
                     long threads) {
  threads = rows * width * count < ALONE ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long r = 0; r < rows; r++) {
    float h[width];
    for (long c = 0; c < width; c += LANES) {
      vector sum = load(bias + c);
      for (long i = 0; i < count; i++)
        sum += load(x + (r + i * dilation) * width + c) * load(taps + i * width + c);
      store(h + c, sum);
    }
    normalize(h, weight, shift, h, 1, width, epsilon);
    for (long c = 0; c < width; c += LANES) store_as(y, r * width + c, load(h + c), bfloat16);
  }
}

/* x [count] += update. */
void run_addition(float *x, const void *update, long count, long bfloat16) {
  for (long i = 0; i < count; i += LANES) store(x + i, load(x + i) + load_as(update, i, bfloat16));
}

/* Samples `first` to `last` after the centre of the first frame of a pulse train with f0 at the frames' centres: see
 * Renderer.cycles and pulse_train. place [hop]: of samples between two centres, 0..1; cycles: the phase before them.
 * Returns the phase after them. */
double run_pulses(const float *f0, const float *place, float *pulses, long first, long last, long hop, double rate,
                  double cycles) {
  for (long s = first, end; s < last; s = end) {
    long frame = s / hop;
    float from = f0[frame], rise = f0[frame + 1] - from;
    end = (frame + 1) * hop < last ? (frame + 1) * hop : last;
    for (long i = s; i < end; i++) {
      cycles += (from + rise * place[i - frame * hop]) / rate;
      pulses[i - first] = cycles - (long)(cycles + 0.5);
    }
  }
  for (long s = first, end; s < last; s = end) {
    long frame = (s + hop / 2) / hop, next = (frame + 1) * hop - hop / 2;
    float harmonics = (long)(1 / f0[frame] * (float)(0.46 * rate)), level = __builtin_sqrtf(2 / harmonics);
    end = next < last ? next : last;
    for (long i = s; i < end; i += LANES) {
      vector turns = all(0);
      long bytes = (end - i < LANES ? end - i : LANES) * sizeof(float);
      memcpy(&turns, pulses + i - first, bytes);
      vector half = sine(turns * 0.5f), sum = sine(turns * (harmonics + 0.5f)) / (half * 2.0f) - 0.5f;
      sum = choose((half < 1e-4f) & (half > -1e-4f), all(harmonics), sum) * level;
      memcpy(pulses + i - first, &sum, bytes);
    }
  }
  return cycles - (long)cycles;
}

/* Filter complex spectra of pulses and noise [rows, bins] and add them up, in the place of the pulses. envelope
 * [rows, bins]; head [rows, 3, bins]: gain and phase of the pulses, gain of the noise. */
void run_filter(float *pulses, const float *noise, const float *envelope, const void *head, long rows, long bins,
                long bfloat16, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long r = 0; r < rows; r++) {
    float real[bins], imaginary[bins], level[bins], *p = pulses + r * 2 * bins;
    const float *q = noise + r * 2 * bins;
    for (long c = 0; c < bins; c += LANES) {
      long b = c + LANES <= bins ? c : bins - LANES, at = r * 3 * bins + b; /* the last vector overlaps */
      vector base = load(envelope + r * bins + b), turns = load_as(head, at + bins, bfloat16) * 0.159154943f;
      vector gain = exponential(within(base + load_as(head, at, bfloat16), -20, 3));
      store(real + b, gain * sine(turns + 0.25f));
      store(imaginary + b, gain * sine(turns));
      store(level + b, exponential(within(base + load_as(head, at + 2 * bins, bfloat16), -20, 3)));
    }
#pragma omp simd
    for (long b = 0; b < bins; b++) {
      float x = p[2 * b], y = p[2 * b + 1];
      p[2 * b] = x * real[b] - y * imaginary[b] + q[2 * b] * level[b];
      p[2 * b + 1] = x * imaginary[b] + y * real[b] + q[2 * b + 1] * level[b];
    }
  }
}

/* Add pieces [rows, stride], whose first `size` samples are multiplied by a window, to a wave, hop samples apart. */
void run_overlap_add(const float *pieces, const float *window, float *wave, long rows, long stride, long size,
                     long hop) {
  for (long r = 0; r < rows; r++, pieces += stride, wave += hop) {
#pragma omp simd
    for (long c = 0; c < size; c++) wave[c] += pieces[c] * window[c];
  }
}
