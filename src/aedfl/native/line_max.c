/* relu(conv1d(x, w, b)).amax(-1) on one thread, and its gradients.
 *
 * Of a filter's answers along a line the largest is kept, and nothing of it if it is not above zero. So answers are not
 * written down, and a slope goes to one place of each sample and filter.
 *
 * Arrays are contiguous: x [n, places, c], the channels of a place side by side, so that what a filter sees at a place
 * is one piece of memory; filters [f, c, width]; y and where [n, f]. `where` is the place of the largest answer, the
 * first of equals, or -1. Sums run in a fixed order. A number that is none goes through to y.
 */

#include "vectors.h"

#define TILE (SUMS / 2) /* places at a time, with two vectors of filters */
#define BLOCK (2 * LANES) /* filters at a time */

typedef struct {
  int64_t samples, channels, places, filters, width;
} line;

typedef struct {
  vec most[2];
  ints place[2];
} best;

INLINE void take(best *found, int v, vec answers, int32_t place) {
  const ints more = above(found->most[v], answers);
  found->most[v] = pick(more, answers, found->most[v]);
  found->place[v] = (more & place) | (found->place[v] & ~more);
}

/* The answers of a block of filters at so many places from `first` on. `w` [span, BLOCK]. */
INLINE void answers(const float *x, const float *w, const float *bias, int64_t channels, int64_t span, int64_t first,
                    best *found, const int tile) {
  vec sums[TILE][2];
  const float *from = x + first * channels;
#pragma GCC unroll 12
  for (int j = 0; j < tile; j++) sums[j][0] = load(bias), sums[j][1] = load(bias + LANES);
  for (int64_t i = 0; i < span; i++, w += BLOCK, from++) {
    const vec left = load(w), right = load(w + LANES);
    const float *at = from;
#pragma GCC unroll 12
    for (int j = 0; j < tile; j++, at += channels) sums[j][0] += left * *at, sums[j][1] += right * *at;
  }
#pragma GCC unroll 12
  for (int j = 0; j < tile; j++)
    for (int v = 0; v < 2; v++) take(found, v, sums[j][v], (int32_t)(first + j));
}

static best search(const line *s, const float *x, const float *w, const float *bias) {
  const int64_t span = s->channels * s->width, count = s->places - s->width + 1;
  best found = {{(vec){0} - __builtin_inff(), (vec){0} - __builtin_inff()}, {{0}, {0}}};
  int64_t p = 0;
  for (; p + TILE <= count; p += TILE) answers(x, w, bias, s->channels, span, p, &found, TILE);
  for (; p < count; p++) answers(x, w, bias, s->channels, span, p, &found, 1);
  return found;
}

int line_max(const line *s, const float *x, const float *w, const float *bias, float *y, int32_t *where) {
  const int64_t span = s->channels * s->width, size = s->places * s->channels;
  const int64_t blocks = (s->filters + BLOCK - 1) / BLOCK;
  float *packed = room(blocks * span * BLOCK), *shift = room(blocks * BLOCK);
  const int ready = packed && shift;
  if (ready) {
    memcpy(shift, bias, 4 * s->filters);
    for (int64_t f = 0; f < s->filters; f++)
      for (int64_t c = 0; c < s->channels; c++)
        for (int64_t t = 0; t < s->width; t++)
          packed[(f / BLOCK * span + t * s->channels + c) * BLOCK + f % BLOCK] = w[(f * s->channels + c) * s->width + t];
    for (int64_t n = 0; n < s->samples; n++)
      for (int64_t b = 0; b < blocks; b++) {
        const best found = search(s, x + n * size, packed + b * span * BLOCK, shift + b * BLOCK);
        for (int64_t f = b * BLOCK; f < least(s->filters, (b + 1) * BLOCK); f++) {
          const int v = f % BLOCK / LANES, lane = f % LANES;
          const int dead = found.most[v][lane] <= 0;
          y[n * s->filters + f] = dead ? 0 : found.most[v][lane];
          where[n * s->filters + f] = dead ? -1 : found.place[v][lane];
        }
      }
  }
  free(packed), free(shift);
  return ready;
}

/* to += from * factor */
INLINE void add(float *restrict to, const float *restrict from, float factor, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] += from[i] * factor;
}

/* Gradients by the filters, the bias and, unless dx is NULL, the input: written, not added to what is there. */
int line_max_slopes(const line *s, const float *x, const float *w, const float *g, const int32_t *where, float *dw,
                    float *db, float *dx) {
  const int64_t span = s->channels * s->width, size = s->places * s->channels;
  float *turned = room(s->filters * span), *sums = room(s->filters * span);
  const int ready = turned && sums;
  if (ready) {
    for (int64_t f = 0; f < s->filters; f++)
      for (int64_t c = 0; c < s->channels; c++)
        for (int64_t t = 0; t < s->width; t++)
          turned[f * span + t * s->channels + c] = w[(f * s->channels + c) * s->width + t];
    memset(db, 0, 4 * s->filters);
    if (dx) memset(dx, 0, 4 * s->samples * size);
    for (int64_t n = 0; n < s->samples; n++)
      for (int64_t f = 0; f < s->filters; f++) {
        const int64_t place = where[n * s->filters + f], at = n * size + place * s->channels;
        const float slope = g[n * s->filters + f];
        if (place < 0) continue;
        db[f] += slope;
        add(sums + f * span, x + at, slope, span);
        if (dx) add(dx + at, turned + f * span, slope, span);
      }
    for (int64_t f = 0; f < s->filters; f++)
      for (int64_t c = 0; c < s->channels; c++)
        for (int64_t t = 0; t < s->width; t++)
          dw[(f * s->channels + c) * s->width + t] = sums[f * span + t * s->channels + c];
  }
  free(turned), free(sums);
  return ready;
}
