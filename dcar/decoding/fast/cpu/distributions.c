/* From logits: distributions of the next tokens, tokens drawn from them, how likely these are, and which of them a policy keeps.
 *
 * The mathematics is that of dcar/sampling.py (warp, sample_several), heads/candidates.py (candidate_features, joint_log_probs) and
 * heads/policy.py, which take some ninety operators for it. A row's result does not depend on the others. layers.c includes this file.
 */

#define MOST_KEPT 64 /* of a distribution; a larger top-k is PyTorch's business */

typedef struct {
  float temperature; /* 0 = the likeliest token alone */
  long top_k, eos;   /* top_k 0 = all */
} Warping;

INLINE int any(ints which) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
  int found = 0;
  for (int i = 0; i < LANES; i++) found |= which[i];
  return found;
#endif
}

/* A row of logits in floats, -inf up to `pad`; whether all are numbers. */
static int widened(const element *logits, float *row, long size, long pad) {
  ints odd = {0};
  for (long c = 0; c < pad; c += LANES) {
    vector v = c < size ? load_some(logits + c, size - c, -__builtin_inff()) : all(-__builtin_inff());
    odd |= v != v;
    memcpy(row + c, &v, sizeof v);
  }
  return !any(odd);
}

#define GROUP (4 * LANES)

/* A distribution without its scale: weights in the order of ids, of all or of those few that are kept, and sums of GROUP of them, by which
 * a place in it is found. */
typedef struct {
  float *weight;
  long count;                  /* a multiple of GROUP; weights behind the last are 0 */
  long kept, place[MOST_KEPT]; /* how many are kept, 0 = all, and their ids */
  double *sums, sum;
} Distribution;

typedef double doubles __attribute__((vector_size(8 * LANES)));

INLINE double total_of(doubles v) {
  double part[LANES];
  memcpy(part, &v, sizeof v);
  UNROLL for (int half = LANES / 2; half; half /= 2)
    UNROLL for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}

/* The k largest of a row, in the order of their ids; among equals the first ones. */
static void keep_largest(const float *row, long pad, long k, float *weight, long *place) {
  float value[MOST_KEPT]; /* from the largest down */
  long from[MOST_KEPT], count = 0;
  for (long c = 0; c < pad; c += LANES) {
    if (count == k && !any(load_float(row + c) > value[k - 1])) continue;
    for (long i = c; i < c + LANES; i++) {
      if (count == k && !(row[i] > value[k - 1])) continue;
      long at = count < k ? count++ : k - 1;
      for (; at > 0 && row[i] > value[at - 1]; at--) value[at] = value[at - 1], from[at] = from[at - 1];
      value[at] = row[i], from[at] = i;
    }
  }
  for (long j = 0; j < k; j++) { /* by id */
    long at = j;
    for (; at > 0 && from[j] < place[at - 1]; at--) weight[at] = weight[at - 1], place[at] = place[at - 1];
    weight[at] = value[j], place[at] = from[j];
  }
}

/* The warped distribution of a row of logits, of which `row` has room for a copy; its sum is not above 0 where there is no distribution. */
static void warp(const element *logits, const Warping *how, int banned, float *row, Distribution *distribution, long size, long pad) {
  distribution->sum = -1;
  if (!widened(logits, row, size, pad)) return;
  if (banned) {
    for (long c = 0; c < pad; c += LANES) {
      vector v = load_float(row + c);
      v = choose(v > -1e30f, v, all(-1e30f));
      memcpy(row + c, &v, sizeof v);
    }
    row[how->eos] = -__builtin_inff();
    for (long c = size; c < pad; c++) row[c] = -__builtin_inff();
  }
  float largest = most_of(row, pad);
  if (how->temperature == 0) { /* one id, the first of the largest */
    memset(distribution->weight, 0, GROUP * sizeof *distribution->weight);
    for (distribution->place[0] = 0; row[distribution->place[0]] != largest; distribution->place[0]++) {}
    distribution->weight[0] = 1, distribution->count = GROUP, distribution->kept = 1, distribution->sums[0] = distribution->sum = 1;
    return;
  }
  if (how->temperature != 1) {
    for (long c = 0; c < pad; c += LANES) {
      vector v = load_float(row + c) / how->temperature;
      memcpy(row + c, &v, sizeof v);
    }
    largest /= how->temperature;
  }
  const float *from = row;
  distribution->kept = how->top_k > 0 && how->top_k < size ? how->top_k : 0;
  distribution->count = pad;
  if (distribution->kept) {
    distribution->count = (distribution->kept + GROUP - 1) / GROUP * GROUP;
    for (long c = 0; c < distribution->count; c++) distribution->weight[c] = -__builtin_inff();
    keep_largest(row, pad, distribution->kept, distribution->weight, distribution->place);
    from = distribution->weight;
  }
  distribution->sum = 0;
  for (long c = 0; c < distribution->count; c += GROUP) {
    doubles some = {0}; /* as a cumulative distribution needs it: the last ids weigh little beside all others */
    UNROLL for (int i = 0; i < 4; i++) {
      vector v = exponential(load_float(from + c + i * LANES) - largest);
      memcpy(distribution->weight + c + i * LANES, &v, sizeof v);
      some += __builtin_convertvector(v, doubles);
    }
    distribution->sum += distribution->sums[c / GROUP] = total_of(some);
  }
}

/* The first id whose cumulative weight exceeds u times all of it; the last one with mass, should rounding leave none. */
static long drawn(const Distribution *distribution, double u) {
  double before = 0, wanted = u * distribution->sum;
  long found = -1;
  for (long c = 0; c < distribution->count && found < 0; before += distribution->sums[c / GROUP], c += GROUP) {
    if (before + distribution->sums[c / GROUP] <= wanted) continue;
    double inside = before;
    for (long i = c; i < c + GROUP && found < 0; i++)
      if ((inside += distribution->weight[i]) > wanted && distribution->weight[i] > 0) found = i;
  }
  if (found < 0)
    for (found = distribution->count - 1; found > 0 && !(distribution->weight[found] > 0);) found--;
  return distribution->kept ? distribution->place[found] : found;
}

/* The distribution to its scale, [size]. */
static void spread(const Distribution *distribution, float *to, long size) {
  float sum = distribution->sum;
  long c = 0;
  if (distribution->kept) {
    memset(to, 0, size * sizeof *to);
    for (long j = 0; j < distribution->kept; j++) to[distribution->place[j]] = distribution->weight[j] / sum;
    return;
  }
  for (; c + LANES <= size; c += LANES) {
    vector v = load_float(distribution->weight + c) / sum;
    memcpy(to + c, &v, sizeof v);
  }
  for (; c < size; c++) to[c] = distribution->weight[c] / sum;
}

/* Distributions [rows, size], where they are asked for, and tokens [rows, several] at the numbers u [rows, several], where these are:
 * of logits [rows, size], the end of speech forbidden in rows that are `banned` (may be absent). How many rows have no distribution, whose
 * results mean nothing; -1 where there is no memory. */
long run_distributions(const element *logits, const Warping *how, const unsigned char *banned, float *distributions, const double *u, long *tokens,
              long rows, long size, long several, long threads) {
  long pad = (size + GROUP - 1) / GROUP * GROUP, undefined = 0, failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : undefined, failed) if (threads > 1 && rows * size > ALONE)
  {
    float *row = malloc(2 * pad * sizeof *row);
    Distribution distribution = {.weight = row + pad, .sums = malloc(pad / GROUP * sizeof(double))};
    int ready = row && distribution.sums;
    failed += !ready;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
      if (!ready) continue;
      warp(logits + r * size, how, banned && banned[r], row, &distribution, size, pad);
      if (!(distribution.sum > 0 && distribution.sum < __builtin_inf())) {
        undefined++;
        continue;
      }
      if (u)
        for (long i = 0; i < several; i++) tokens[r * several + i] = drawn(&distribution, u[r * several + i]);
      if (distributions) spread(&distribution, distributions + r * size, size);
    }
    free(row);
    free(distribution.sums);
  }
  return failed ? -1 : undefined;
}

/* The log of the sum of exponentials; NaN where one of them is none. */
static float log_sum(const float *x, long count) {
  float largest = x[0], sum = 0;
  for (long c = 1; c < count; c++) largest = x[c] > largest ? x[c] : largest;
  for (long c = 0; c < count; c++) sum += __builtin_expf(x[c] - largest);
  return largest + __builtin_logf(sum);
}

/* Log-probabilities of draw and size together (joint_log_probs of heads/candidates.py) [rows, several, actions], from what is seen of the
 * candidates [rows, several, reach, features], by scores that are linear in it: weight [reach features, reach], bias [reach], and
 * `dial` for each token. Sizes behind the reach score `never`. `ratio`: which feature is the chunk scorer, where draws are several. */
void run_decision(const float *seen, const float *weight, const float *bias, float *distribution, long rows, long several, long reach,
                  long features, long actions, long ratio, float dial, float never) {
  for (long r = 0; r < rows; r++, distribution += several * actions) {
    for (long i = 0; i < several; i++, seen += reach * features) {
      float *score = distribution + i * actions;
      for (long a = 0; a < actions; a++) score[a] = (a < reach ? bias[a] : never) + dial * (a + 1);
      for (long f = 0; f < reach * features; f++)
        for (long a = 0; a < reach; a++) score[a] += seen[f] * weight[f * reach + a];
    }
    if (several > 1) {
      const float *first = seen - several * reach * features;
      float share[several];
      for (long i = 0; i < several; i++) share[i] = 0;
      for (long a = 0; a < reach; a++) {
        for (long i = 0; i < several; i++) share[i] += first[(i * reach + a) * features + ratio];
        float all_of = log_sum(share, several);
        for (long i = 0; i < several; i++) distribution[i * actions + a] += share[i] - all_of;
      }
    }
    float all_of = log_sum(distribution, several * actions);
    for (long c = 0; c < several * actions; c++) distribution[c] -= all_of;
  }
}

/* candidate_features of tokens [batch, several, steps] drawn from logits [batch, steps, size]: seen [batch, several, steps, 3].
 * How many rows of logits hold what is no number, or a token that is no id; -1 where there is no memory. */
long run_features(const element *logits, const long *tokens, float *seen, long batch, long several, long steps, long size,
                  float unlikely, long threads) {
  long pad = (size + LANES - 1) / LANES * LANES, odd = 0, failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : odd, failed) if (threads > 1 && batch * steps * size > ALONE)
  {
    float *row = malloc(pad * sizeof *row);
    if (!row) failed++;
#pragma omp for schedule(static)
    for (long r = 0; r < batch * steps; r++) {
      if (!row) continue;
      int fine = widened(logits + r * size, row, size, pad);
      for (long i = 0; i < several; i++) {
        long token = tokens[(r / steps * several + i) * steps + r % steps];
        fine &= token >= 0 && token < size;
      }
      float largest = most_of(row, pad);
      if (!fine || largest - largest != 0) {
        odd++;
        continue;
      }
      vector sum = all(0), product = all(0);
      for (long c = 0; c < pad; c += LANES) {
        vector v = load_float(row + c) - largest, p = exponential(v);
        sum += p;
        product += p * choose(v > -100.0f, v, all(0)); /* 0 log 0 = 0 */
      }
      float norm = __builtin_logf(total(sum)), entropy = norm - total(product) / total(sum);
      for (long i = 0; i < several; i++) {
        long at = (r / steps * several + i) * steps + r % steps;
        float likely = row[tokens[at]] - largest - norm, *to = seen + 3 * at;
        to[0] = likely > unlikely ? likely : unlikely, to[1] = -norm, to[2] = entropy;
      }
    }
    free(row);
  }
  return failed ? -1 : odd;
}
