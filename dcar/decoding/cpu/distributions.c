/* From logits: distributions of the next tokens, tokens drawn from them, and a policy's whole decision about these.
 *
 * The mathematics is that of dcar/sampling.py (warp, sample_several), heads/candidates.py (candidate_features,
 * joint_log_probs) and heads/policy.py.
 */

#define MOST_KEPT 64 /* of a distribution; a larger top-k is PyTorch's business */
#define GROUP (4 * LANES)

typedef double doubles __attribute__((vector_size(8 * LANES)));

typedef struct {
  float temperature; /* 0 = the likeliest token alone */
  long top_k, eos;   /* top_k 0 = all */
} Warping;

/* A distribution without its scale: weights in the order of ids, of all or of those few that are kept, and sums of
 * GROUP of them, by which a place in it is found. */
typedef struct {
  float *row, *weight;         /* the logits and -inf after them; weights after the last are 0 */
  long size, pad, count;       /* ids; rounded up to a GROUP; weights, a multiple of GROUP */
  long kept, place[MOST_KEPT]; /* how many are kept, 0 = all, and their ids */
  double *sums, sum;           /* sum: not above 0, or infinite, if there is no distribution */
} Distribution;

static long rounded_up(long size) { return (size + GROUP - 1) / GROUP * GROUP; }

/* Room for one distribution of so many ids for each thread; 0 if there is no memory. */
static Distribution *make_room(long size, long threads) {
  long pad = rounded_up(size), bytes = sizeof(Distribution) + pad / GROUP * sizeof(double) + 2 * pad * sizeof(float);
  Distribution *rooms = malloc(threads * bytes);
  double *sums = (double *)(rooms + threads);
  for (long t = 0; rooms && t < threads; t++) {
    float *row = (float *)(sums + threads * pad / GROUP) + 2 * t * pad;
    rooms[t] = (Distribution){.row = row, .weight = row + pad, .size = size, .pad = pad};
    rooms[t].sums = sums + t * pad / GROUP;
  }
  return rooms;
}

/* Copy a row of logits; return whether all are numbers. */
static int read_logits(Distribution *of, const float *logits) {
  ints odd = {0};
  memcpy(of->row, logits, of->size * sizeof(float));
  for (long c = of->size; c < of->pad; c++) of->row[c] = -__builtin_inff();
  for (long c = 0; c < of->pad; c += LANES) odd |= load(of->row + c) != load(of->row + c);
  return !any(odd);
}

/* The k largest of a row, in the order of their ids; among equals the first ones. */
static void keep_largest(const float *row, long pad, long k, float *weight, long *place) {
  float value[MOST_KEPT]; /* from the largest down */
  long from[MOST_KEPT], count = 0;
  for (long c = 0; c < pad; c += LANES) {
    if (count == k && !any(load(row + c) > value[k - 1])) continue;
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

/* The warped distribution of a row of numbers, which is overwritten. */
static void warp(const Warping *how, int banned, Distribution *of) {
  float *row = of->row, temperature = how->temperature > 0 ? how->temperature : 1;
  long top_k = how->temperature > 0 ? how->top_k : 1;
  if (banned) {
    for (long c = 0; c < of->size; c++) row[c] = row[c] > -1e30f ? row[c] : -1e30f;
    row[how->eos] = -__builtin_inff();
  }
  if (temperature != 1)
    for (long c = 0; c < of->pad; c += LANES) store(row + c, load(row + c) / temperature);
  float largest = largest_of(row, of->pad);
  const float *from = row;
  of->kept = top_k > 0 && top_k < of->size ? top_k : 0;
  of->count = of->pad;
  if (of->kept) {
    from = of->weight;
    of->count = rounded_up(of->kept);
    for (long c = 0; c < of->count; c++) of->weight[c] = -__builtin_inff();
    keep_largest(row, of->pad, of->kept, of->weight, of->place);
  }
  of->sum = 0;
  for (long c = 0; c < of->count; c += GROUP) {
    doubles some = {0}; /* as a cumulative distribution needs it: the last ids weigh little beside all others */
    UNROLL for (int i = 0; i < 4; i++) {
      vector v = exponential(load(from + c + i * LANES) - largest);
      store(of->weight + c + i * LANES, v);
      some += __builtin_convertvector(v, doubles);
    }
    UNROLL for (int half = LANES / 2; half; half /= 2)
      UNROLL for (int i = 0; i < half; i++) some[i] += some[i + half];
    of->sum += of->sums[c / GROUP] = some[0];
  }
}

/* The first id whose cumulative weight exceeds u times the sum; the last one with mass, should rounding leave none. */
static long drawn(const Distribution *of, double u) {
  double before = 0, wanted = u * of->sum;
  long found = -1;
  for (long c = 0; c < of->count && found < 0; before += of->sums[c / GROUP], c += GROUP) {
    if (before + of->sums[c / GROUP] <= wanted) continue;
    double inside = before;
    for (long i = c; i < c + GROUP && found < 0; i++)
      if ((inside += of->weight[i]) > wanted && of->weight[i] > 0) found = i;
  }
  if (found < 0)
    for (found = of->count - 1; found > 0 && !(of->weight[found] > 0);) found--;
  return of->kept ? of->place[found] : found;
}

/* The distribution to its scale, [size]. */
static void spread(const Distribution *of, float *to) {
  float sum = of->sum;
  if (of->kept) {
    memset(to, 0, of->size * sizeof *to);
    for (long j = 0; j < of->kept; j++) to[of->place[j]] = of->weight[j] / sum;
    return;
  }
  for (long c = 0; c < of->pad; c += LANES) store(of->weight + c, load(of->weight + c) / sum);
  memcpy(to, of->weight, of->size * sizeof *to);
}

/* Distributions [rows, size] and tokens [rows, several] at the numbers u [rows, several], each if it is asked for: of
 * logits [rows, size], the end of speech forbidden in rows that are `banned` (may be absent). Returns how many rows
 * have no distribution; then the results mean nothing. */
long run_distributions(const float *logits, const Warping *how, const unsigned char *banned, float *distributions,
                       const double *u, long *tokens, long rows, long size, long several, long threads) {
  long undefined = 0;
  Distribution *rooms = make_room(size, threads);
  if (!rooms) return -1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : undefined) if (rows * size > ALONE)
  for (long r = 0; r < rows; r++) {
    Distribution *of = rooms + omp_get_thread_num();
    of->sum = 0;
    if (read_logits(of, logits + r * size)) warp(how, banned && banned[r], of);
    if (of->sum > 0 && of->sum < __builtin_inf()) {
      for (long i = 0; u && i < several; i++) tokens[r * several + i] = drawn(of, u[r * several + i]);
      if (distributions) spread(of, distributions + r * size);
    } else undefined++;
  }
  free(rooms);
  return undefined;
}

/* The log of the sum of exponentials; NaN if one of them is none. */
static float log_sum(const float *x, long count) {
  float largest = x[0], sum = 0;
  for (long c = 1; c < count; c++) largest = x[c] > largest ? x[c] : largest;
  for (long c = 0; c < count; c++) sum += __builtin_expf(x[c] - largest);
  return largest + __builtin_logf(sum);
}

#define PLAIN 3 /* features of a token that come from its distribution; the chunk scorer's is after them */

typedef struct {
  const float *weight, *bias; /* scores of the ends are linear in all features: [reach features, reach], [reach] */
  const ChunkScorer *scorer;  /* may be absent, if there is one candidate */
  long reach, features, actions; /* of a chunk; of a token; sizes, those above the reach score `never` */
  float unlikely, never;
} Decision;

/* The number of the i-th of several candidates, given the first one's; see dcar.sampling.shifted. */
static double shifted(double u, long i, long several) {
  double v = u + (double)i / several, below_one = 1 - 0x1p-40;
  if (v >= 1) v -= 1;
  return v < below_one ? v : below_one;
}

/* Draw tokens of several candidates from a row of logits, the first at the number u, and their candidate_features;
 * those of the next candidate are a whole chunk further. Returns whether there is a distribution. */
static int see(const Decision *d, const float *logits, const Warping *how, int banned, double u, long several,
               long *tokens, float *seen, Distribution *of) {
  if (!read_logits(of, logits)) return 0;
  float largest = largest_of(of->row, of->pad);
  if (largest - largest != 0) return 0;
  vector sum = all(0), weighted = all(0);
  for (long c = 0; c < of->pad; c += LANES) {
    vector v = load(of->row + c) - largest, p = exponential(v);
    sum += p;
    weighted += p * choose(v > -100.0f, v, all(0)); /* 0 log 0 = 0 */
  }
  float norm = __builtin_logf(total(sum)), entropy = norm - total(weighted) / total(sum);
  warp(how, banned, of);
  if (!(of->sum > 0)) return 0;
  for (long i = 0; i < several; i++, tokens += d->reach, seen += d->reach * d->features) {
    *tokens = drawn(of, shifted(u, i, several));
    float likely = logits[*tokens] - largest - norm;
    seen[0] = likely > d->unlikely ? likely : d->unlikely, seen[1] = -norm, seen[2] = entropy;
  }
  return 1;
}

/* joint_log_probs [several, actions] of the features of a hidden state's candidates [several, reach, features], with
 * `dial` for each token. Returns 0 if one is no number; else 1. */
static int decide(const Decision *d, const float *seen, float *log_probs, long several, float dial) {
  long reach = d->reach, features = d->features, count = several * d->actions;
  for (long i = 0; i < several; i++) {
    float *score = log_probs + i * d->actions;
    const float *of = seen + i * reach * features;
    for (long a = 0; a < d->actions; a++) score[a] = (a < reach ? d->bias[a] : d->never) + dial * (a + 1);
    for (long f = 0; f < reach * features; f++)
      for (long a = 0; a < reach; a++) score[a] += of[f] * d->weight[f * reach + a];
  }
  if (several > 1) { /* shares of the candidates */
    float share[several];
    memset(share, 0, sizeof share);
    for (long a = 0; a < reach; a++) {
      for (long i = 0; i < several; i++) share[i] += seen[(i * reach + a) * features + PLAIN];
      float all_of = log_sum(share, several);
      for (long i = 0; i < several; i++) log_probs[i * d->actions + a] += share[i] - all_of;
    }
  }
  float all_of = log_sum(log_probs, count);
  for (long c = 0; c < count; c++) log_probs[c] -= all_of;
  return all_of == all_of;
}

/* A whole decision after the draw: tokens [batch, several, reach], the first ones drawn at numbers u [batch, reach], from
 * logits [batch, reach, size] of hidden states [batch, D]; their features `seen` [batch, several, reach, features]; and
 * log-probabilities of candidate and size together [batch, several, actions]. 0 if a row has no distribution; else 1. */
int run_decision(const Decision *d, const float *logits, const float *hidden, const Warping *how,
                 const unsigned char *banned, const double *u, long *tokens, float *seen, float *log_probs, long batch,
                 long several, long size, long threads, float dial) {
  long reach = d->reach, features = d->features, rows = batch * several, undefined = 0, all_ids = batch * reach * size;
  Distribution *rooms = make_room(size, threads);
  if (!rooms) return -1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : undefined) if (all_ids > ALONE)
  for (long r = 0; r < batch * reach; r++) {
    long at = r / reach * several * reach + r % reach;
    undefined += !see(d, logits + r * size, how, banned && banned[r], u[r], several, tokens + at,
                      seen + at * features, rooms + omp_get_thread_num());
  }
  free(rooms);
  if (undefined) return 0;
  if (d->scorer && score_chunks(d->scorer, hidden, tokens, seen, rows, several, reach, features, threads)) return -1;
  for (long b = 0; b < batch; b++) {
    float *own = log_probs + b * several * d->actions;
    if (!decide(d, seen + b * several * reach * features, own, several, dial)) return 0;
  }
  return 1;
}
