/* Merging flat models, what follows on a merge, and what its weights did to the loss: each model is read once, where it
 * lies.
 *
 * A model is `size` numbers; `held` says which of them it keeps (NULL: all). One of share 0 is not looked at. Products
 * are rounded before they are added, and models are added in their order, as PyTorch does it one tensor at a time: a
 * merge has the same bits either way. Momentum is added in one rounding where the processor can, as PyTorch does.
 */

#include <stdint.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#define BLOCK 1024 /* numbers at a time, so that sums stay in the nearest cache */
#define LANES 16

#if defined(__FMA__) || defined(__aarch64__)
#define TIMES_PLUS(a, b, c) __builtin_fmaf(a, b, c)
#else
#define TIMES_PLUS(a, b, c) ((a) * (b) + (c))
#endif

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The summed shares of those who hold each number, and, unless `sums` is NULL, what they hold times their share. */
static void weigh(int64_t from, int64_t count, int64_t models, const float *const *x, const uint8_t *const *held,
                  const float *shares, float *restrict holders, float *restrict sums) {
  for (int64_t i = 0; i < count; i++) holders[i] = 0;
  for (int64_t i = 0; sums && i < count; i++) sums[i] = 0;
  for (int64_t m = 0; m < models; m++) {
    const float share = shares[m];
    if (!(share > 0)) continue;
    const float *restrict values = x[m] + from;
    if (held[m]) {
      const uint8_t *restrict kept = held[m] + from;
      for (int64_t i = 0; i < count; i++) holders[i] += kept[i] ? share : 0;
      for (int64_t i = 0; sums && i < count; i++) sums[i] += kept[i] ? values[i] * share : 0;
    } else {
      for (int64_t i = 0; i < count; i++) holders[i] += share;
      for (int64_t i = 0; sums && i < count; i++) sums[i] += values[i] * share;
    }
  }
}

/* Per number, the mean by shares of those who hold it; that of `fallback` where nobody does. */
void merge_models(int64_t size, int64_t models, const float *const *x, const uint8_t *const *held, const float *shares,
                  const float *fallback, float *merged) {
  float holders[BLOCK], sums[BLOCK];
  for (int64_t from = 0; from < size; from += BLOCK) {
    const int64_t count = least(BLOCK, size - from);
    weigh(from, count, models, x, held, shares, holders, sums);
    for (int64_t i = 0; i < count; i++) merged[from + i] = holders[i] > 0 ? sums[i] / holders[i] : fallback[from + i];
  }
}

/* The sum of a block, lane by lane first. */
static float total(const float *values) {
  float lanes[LANES] = {0}, found = 0;
  for (int64_t i = 0; i < BLOCK; i += LANES)
    for (int k = 0; k < LANES; k++) lanes[k] += values[i + k];
  for (int k = 0; k < LANES; k++) found += lanes[k];
  return found;
}

/* For each model, the sum of g (x - merged) / holders over the numbers that it holds; 0 for those of share 0. */
void merge_slopes(int64_t size, int64_t models, const float *const *x, const uint8_t *const *held, const float *shares,
                  const float *merged, const float *g, double *slopes) {
  float holders[BLOCK], steep[BLOCK], terms[BLOCK] = {0};
  for (int64_t m = 0; m < models; m++) slopes[m] = 0;
  for (int64_t from = 0; from < size; from += BLOCK) {
    const int64_t count = least(BLOCK, size - from);
    weigh(from, count, models, x, held, shares, holders, 0);
    for (int64_t i = 0; i < count; i++) steep[i] = holders[i] > 0 ? g[from + i] / holders[i] : 0;
    for (int64_t i = count; i < BLOCK; i++) terms[i] = 0;
    for (int64_t m = 0; m < models; m++) {
      if (!(shares[m] > 0)) continue;
      const float *restrict values = x[m] + from, *restrict mean = merged + from;
      for (int64_t i = 0; i < count; i++) terms[i] = (values[i] - mean[i]) * steep[i];
      for (int64_t i = 0; held[m] && i < count; i++) terms[i] = held[m][from + i] ? terms[i] : 0;
      slopes[m] += total(terms);
    }
  }
}

/* What follows on a merge. With `end`, what was merged moves by `times` the way from `start` to there; with `base`, slow
 * momentum carries it on, but for numbers that `held` (NULL: none) removes. `vector` is the outcome, `faster` (with
 * `base`) the new velocity, and `sent`, unless NULL, the vector moved by `more` times the same way. Behind the first
 * `parameters` numbers lies a state: it moves by `share` of the way instead, and once. */
void merge_follow(int64_t size, int64_t parameters, const float *merged, const float *start, const float *end,
                  float times, float share, const float *base, const float *velocity, float beta, const uint8_t *held,
                  float more, float *vector, float *faster, float *sent) {
  float way[BLOCK] = {0}, moved[BLOCK];
  parameters = least(parameters, size);
  for (int64_t from = 0, count; from < size; from += count) {
    const int state = from >= parameters; /* a block is the one or the other */
    count = least(BLOCK, (state ? size : parameters) - from);
    const float step = state ? share : times;
    float *restrict to = vector + from;
    for (int64_t i = 0; end && i < count; i++) way[i] = end[from + i] - start[from + i];
    for (int64_t i = 0; i < count; i++) moved[i] = end ? way[i] * step + merged[from + i] : merged[from + i];
    if (base) {
      float *restrict speed = faster + from;
      for (int64_t i = 0; i < count; i++) speed[i] = TIMES_PLUS(beta, velocity[from + i], moved[i] - base[from + i]);
      for (int64_t i = 0; i < count; i++) to[i] = state ? moved[i] : base[from + i] + speed[i];
      for (int64_t i = 0; held && i < count; i++) to[i] = held[from + i] ? to[i] : moved[i];
      for (int64_t i = 0; held && i < count; i++) speed[i] *= (float)held[from + i];
    } else {
      for (int64_t i = 0; i < count; i++) to[i] = moved[i];
    }
    for (int64_t i = 0; sent && i < count; i++) sent[from + i] = state ? to[i] : way[i] * more + to[i];
  }
}
