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
  float *row, *weight;         /* the logits, widened; weights behind the last are 0 */
  long count;                  /* a multiple of GROUP */
  long kept, place[MOST_KEPT]; /* how many are kept, 0 = all, and their ids */
  double *sums, sum;
} Distribution;

/* Room for `pad` ids, to be given back by free(sums); 0 where there is no memory. */
static int make_room(Distribution *distribution, long pad) {
  distribution->sums = malloc(pad / GROUP * sizeof(double) + 2 * pad * sizeof(float));
  distribution->row = (float *)(distribution->sums + pad / GROUP), distribution->weight = distribution->row + pad;
  return distribution->sums != 0;
}

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

/* The warped distribution of its row of numbers, which is overwritten; its sum is not above 0 where there is none. `known`: the weights
 * are the exponentials of the row, without its largest, already. */
static void warp(const Warping *how, int banned, int known, Distribution *distribution, long size, long pad) {
  float *row = distribution->row;
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
  known &= !banned && how->temperature == 1 && !distribution->kept;
  if (distribution->kept) {
    distribution->count = (distribution->kept + GROUP - 1) / GROUP * GROUP;
    for (long c = 0; c < distribution->count; c++) distribution->weight[c] = -__builtin_inff();
    keep_largest(row, pad, distribution->kept, distribution->weight, distribution->place);
  }
  if (distribution->kept || known) from = distribution->weight;
  distribution->sum = 0;
  for (long c = 0; c < distribution->count; c += GROUP) {
    doubles some = {0}; /* as a cumulative distribution needs it: the last ids weigh little beside all others */
    UNROLL for (int i = 0; i < 4; i++) {
      vector v = known ? load_float(from + c + i * LANES) : exponential(load_float(from + c + i * LANES) - largest);
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
    Distribution distribution;
    int ready = make_room(&distribution, pad);
    failed += !ready;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
      if (!ready) continue;
      distribution.sum = -1;
      if (widened(logits + r * size, distribution.row, size, pad)) warp(how, banned && banned[r], 0, &distribution, size, pad);
      if (!(distribution.sum > 0 && distribution.sum < __builtin_inf())) {
        undefined++;
        continue;
      }
      if (u)
        for (long i = 0; i < several; i++) tokens[r * several + i] = drawn(&distribution, u[r * several + i]);
      if (distributions) spread(&distribution, distributions + r * size, size);
    }
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

#define PLAIN 3 /* of what is seen of a token comes from its distribution; the chunk scorer stands behind it */

typedef struct {
  const float *weight, *bias; /* scores of the ends are linear in all that is seen: [reach features, reach], [reach] */
  int (*scorer)(const void *, const float *, const long *, const float *, float *, long, long, long, long, long, long);
  const void *scorer_weights; /* run_chunk_scorer for float32; may be absent, where there is one candidate */
  long width, reach, features, actions; /* of a hidden state; of a chunk; of a token; sizes, those behind the reach score `never` */
  float unlikely, never;
} Decision;

/* Tokens drawn from a row of logits at numbers u [several], and what candidate_features says of them; those of the next candidate
 * stand a whole chunk further. Whether there is a distribution. */
static int see(const Decision *d, const element *logits, const Warping *how, int banned, const double *u, long several, long *tokens,
               float *seen, Distribution *distribution, long size, long pad) {
  if (!widened(logits, distribution->row, size, pad)) return 0;
  float largest = most_of(distribution->row, pad);
  if (largest - largest != 0) return 0;
  vector sum = all(0), product = all(0);
  for (long c = 0; c < pad; c += LANES) {
    vector v = load_float(distribution->row + c) - largest, p = exponential(v);
    memcpy(distribution->weight + c, &p, sizeof p);
    sum += p;
    product += p * choose(v > -100.0f, v, all(0)); /* 0 log 0 = 0 */
  }
  float norm = __builtin_logf(total(sum)), entropy = norm - total(product) / total(sum);
  warp(how, banned, 1, distribution, size, pad);
  if (!(distribution->sum > 0)) return 0;
  for (long i = 0; i < several; i++, tokens += d->reach, seen += d->reach * d->features) {
    *tokens = drawn(distribution, u[i]);
    float likely = widen(logits[*tokens]) - largest - norm;
    seen[0] = likely > d->unlikely ? likely : d->unlikely, seen[1] = -norm, seen[2] = entropy;
  }
  return 1;
}

/* joint_log_probs of heads/candidates.py [several, actions] of what is seen of a hidden state's candidates [several, reach, features],
 * with `dial` for each token. Which is the largest; -1 where one is no number. */
static long decide(const Decision *d, const float *seen, float *log_probs, long several, float dial) {
  long reach = d->reach, features = d->features, best = 0, count = several * d->actions;
  for (long i = 0; i < several; i++) {
    float *score = log_probs + i * d->actions;
    const float *of = seen + i * reach * features;
    for (long a = 0; a < d->actions; a++) score[a] = (a < reach ? d->bias[a] : d->never) + dial * (a + 1);
    for (long f = 0; f < reach * features; f++)
      for (long a = 0; a < reach; a++) score[a] += of[f] * d->weight[f * reach + a];
  }
  if (several > 1) { /* shares of the candidates */
    float share[several];
    for (long i = 0; i < several; i++) share[i] = 0;
    for (long a = 0; a < reach; a++) {
      for (long i = 0; i < several; i++) share[i] += seen[(i * reach + a) * features + PLAIN];
      float all_of = log_sum(share, several);
      for (long i = 0; i < several; i++) log_probs[i * d->actions + a] += share[i] - all_of;
    }
  }
  float all_of = log_sum(log_probs, count);
  for (long c = 0; c < count; c++) {
    log_probs[c] -= all_of;
    if (log_probs[c] > log_probs[best]) best = c;
  }
  return all_of == all_of ? best : -1;
}

/* A whole decision after the draw: candidates drawn side by side at numbers u [batch, reach, several] from logits [batch, reach, size]
 * behind hidden states [batch, width], tokens [batch, several, reach]; what is `seen` of them [batch, several, reach, features];
 * log-probabilities of candidate and size together [batch, several, actions]; and the likeliest: sizes, candidates `chosen`, their
 * log-probabilities `taken` [batch], tokens `spoken` [batch, reach]. The longest of these sizes; 0 where a row has no distribution, -1
 * where there is no memory. */
long run_decision(const Decision *d, const element *logits, const element *hidden, const Warping *how, const unsigned char *banned,
                  const double *u, long *tokens, float *seen, float *log_probs, long *sizes, long *chosen, float *taken, long *spoken,
                  long batch, long several, long size, long threads, float dial) {
  long pad = (size + GROUP - 1) / GROUP * GROUP, reach = d->reach, chunk = reach * d->features, undefined = 0, failed = 0, longest = 0;
#pragma omp parallel num_threads(threads) reduction(+ : undefined, failed) if (threads > 1 && batch * reach * size > ALONE)
  {
    Distribution distribution;
    int ready = make_room(&distribution, pad);
    failed += !ready;
#pragma omp for schedule(static)
    for (long r = 0; r < batch * reach; r++) {
      long at = r / reach * several * reach + r % reach;
      if (ready)
        undefined += !see(d, logits + r * size, how, banned && banned[r], u + r * several, several, tokens + at,
                          seen + at * d->features, &distribution, size, pad);
    }
    free(distribution.sums);
  }
  if (failed || undefined) return failed ? -1 : 0;
  if (d->scorer) {
    float *wide = malloc(batch * d->width * sizeof *wide);
    if (!wide) return -1;
    for (long i = 0; i < batch * d->width; i++) wide[i] = widen(hidden[i]);
    failed = d->scorer(d->scorer_weights, wide, tokens, seen, seen + PLAIN, batch * several, several, reach, d->features, d->features,
                       threads);
    free(wide);
    if (failed) return failed == 1 ? -1 : 0;
  }
  for (long b = 0; b < batch; b++) {
    long best = decide(d, seen + b * several * chunk, log_probs + b * several * d->actions, several, dial);
    if (best < 0) return 0;
    chosen[b] = best / d->actions, sizes[b] = best % d->actions + 1, taken[b] = log_probs[b * several * d->actions + best];
    memcpy(spoken + b * reach, tokens + (b * several + chosen[b]) * reach, reach * sizeof *spoken);
    longest = sizes[b] > longest ? sizes[b] : longest;
  }
  return longest;
}
