/* Local training of a chain of layers in one call: all its mini-batches, forward, backward and step, on one thread.
 *
 * Layers are dense ones, convolutions of images with pooling and ReLU (conv_pool.c), and convolutions over a line of
 * words with ReLU and maximum, which only come first, several side by side. Level 0 are the samples; a layer reads the
 * numbers of its level and writes those of the next. Sums run in a fixed order. The loss is the cross entropy.
 *
 * A convolution over words: what a tap of a filter makes of a word does not depend on where the word stands, so it is
 * computed once for each word of a mini-batch, and the answer at a place is the sum of as many numbers as there are
 * taps. Only the largest answer has a slope.
 */

#include <math.h>

#include "conv_pool.h"

#define HEIGHT 6 /* of the pieces in which matrices are multiplied, in rows, and their width in vectors */
#define BREADTH (SUMS / HEIGHT)
#define SLACK (BREADTH * LANES) /* behind arrays: vectors at the end of a row reach beyond it, and are not used there */

enum { DENSE, IMAGE, WORDS };

typedef struct {
  int64_t kind, level, relu, inputs, outputs; /* numbers of a sample */
  int64_t column; /* where its answers begin among those of its level */
  int64_t weight, bias; /* where they lie in the vector; no bias: -1 */
  shape image;
  int64_t table, words, channels, width; /* of words: where their table lies, its rows and columns; taps */
} layer;

typedef struct {
  int64_t layers, parameters, batch, samples, steps; /* samples: those in x and y */
  float lr, momentum, weight_decay, proximal, clip_norm; /* clip_norm: none below 0 */
} plan;

/* ---- matrices ---- */

/* c [rows, count] = bias + a [rows, depth] b [depth, count]: an entry of a is a[i * across + k * along]. */
INLINE void piece(const float *a, int64_t across, int64_t along, const float *b, int64_t pitch, const float *bias,
                  float *c, int64_t apart, int64_t depth, int64_t count, const int rows, const int vectors) {
  vec sums[HEIGHT][BREADTH];
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[i][v] = bias ? load(bias + v * LANES) : (vec){0};
  for (int64_t k = 0; k < depth; k++, a += along, b += pitch) {
    vec right[BREADTH];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sums[i][v] += right[v] * a[i * across];
  }
  const int64_t last = count - (vectors - 1) * LANES;
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 3
    for (int v = 0; v < vectors - 1; v++) store(c + i * apart + v * LANES, sums[i][v]);
    float *end = c + i * apart + (vectors - 1) * LANES;
    if (last == LANES) store(end, sums[i][vectors - 1]);
    else memcpy(end, &sums[i][vectors - 1], 4 * last);
  }
}

static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t across, int64_t along,
                     const float *b, int64_t pitch, const float *bias, float *c, int64_t apart) {
  for (int64_t j = 0; j < columns; j += BREADTH * LANES) {
    const int64_t count = least(BREADTH * LANES, columns - j), vectors = whole(count) / LANES;
    for (int64_t i = 0; i < rows; i += HEIGHT) {
      const int64_t many = least(HEIGHT, rows - i);
#define PIECE(R, V) \
  case R * 8 + V: \
    piece(a + i * across, across, along, b + j, pitch, bias ? bias + j : NULL, c + i * apart + j, apart, depth, \
          count, R, V); \
    break;
#define PIECES(V) PIECE(1, V) PIECE(2, V) PIECE(3, V) PIECE(4, V) PIECE(5, V) PIECE(6, V)
      switch (many * 8 + vectors) {
        PIECES(1) PIECES(2)
#if BREADTH > 2
        PIECES(3) PIECES(4)
#endif
      }
    }
  }
}

/* to [columns, pitch] = from [rows, columns], turned; what fills a row of it up stays as it is. */
static void turn(const float *from, int64_t rows, int64_t columns, float *to, int64_t pitch) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j++)
      for (int64_t k = i; k < least(rows, i + LANES); k++) to[j * pitch + k] = from[k * columns + j];
}

/* ---- what one call works with ---- */

typedef struct {
  const layer *layers;
  const plan *p;
  const float *x; /* [samples, inputs], or numbers of words as int64 */
  float *vector, *gradient, *velocity, *mixed, *turned;
  float **values, **slopes; /* by level, [batch, its numbers] */
  void **codes; /* by layer: where the largest answers were */
  /* of words */
  int64_t stride; /* numbers of a word in `answers`: all taps of all filters, those of a layer in whole vectors */
  int64_t wide; /* channels in whole vectors */
  int64_t known; /* words of this mini-batch */
  int32_t *number; /* [words]: a word's number in this mini-batch from 1 on, or 0 */
  int64_t *list; /* [known]: the words */
  float *embedded, *embedded_slopes; /* [known, wide] */
  float *answers; /* [known, stride] */
  float *taps; /* [channels, stride] */
  const float **rows, **at; /* [places]: where the answers to a sample's words begin, all of them and one vector's */
  float *filters, *filter_slopes; /* all layers': [filters, taps, wide] */
} work;

INLINE int64_t levels(const work *w) { return w->layers[w->p->layers - 1].level + 2; }
INLINE int is_text(const work *w) { return w->layers[0].kind == WORDS; }
INLINE int has_next(const work *w, int64_t i) { return i < w->p->layers && w->layers[i].kind == WORDS; }

/* Numbers of a sample at a level. */
static int64_t width_of(const work *w, int64_t level) {
  int64_t width = 0;
  for (int64_t i = 0; i < w->p->layers; i++) {
    if (w->layers[i].level == level) return w->layers[i].inputs;
    if (w->layers[i].level == level - 1) width += w->layers[i].outputs;
  }
  return width;
}

static float *slack(int64_t count) { return space(count + SLACK); }

static void leave(work *w) {
  for (int64_t i = 0; w->values && i < levels(w); i++) free(w->values[i]);
  for (int64_t i = 0; w->slopes && i < levels(w); i++) free(w->slopes[i]);
  for (int64_t i = 0; w->codes && i < w->p->layers; i++) free(w->codes[i]);
  free(w->values), free(w->slopes), free(w->codes), free(w->vector), free(w->gradient);
  free(w->mixed), free(w->turned), free(w->number), free(w->list), free(w->embedded);
  free(w->embedded_slopes), free(w->answers), free(w->taps), free(w->filters), free(w->filter_slopes);
  free(w->rows), free(w->at);
}

/* Memory for words; 0 where there is not enough. */
static int enter_text(work *w) {
  const layer *first = w->layers;
  int64_t patches = 0;
  w->wide = whole(first->channels);
  for (int64_t i = 0; has_next(w, i); i++) {
    w->stride += first[i].width * whole(first[i].outputs);
    patches += first[i].width * first[i].outputs * w->wide;
  }
  const int64_t most = least(first->words, w->p->batch * first->inputs);
  w->number = calloc((size_t)first->words, sizeof(int32_t));
  w->list = malloc((size_t)most * sizeof(int64_t));
  w->embedded = room(most * w->wide + SLACK), w->embedded_slopes = slack(most * w->wide);
  w->answers = slack(most * w->stride), w->taps = room(first->channels * w->stride + SLACK);
  w->filters = room(patches), w->filter_slopes = slack(patches);
  w->rows = malloc((size_t)first->inputs * sizeof *w->rows), w->at = malloc((size_t)first->inputs * sizeof *w->at);
  return w->rows && w->at && w->number && w->list && w->embedded && w->embedded_slopes && w->answers && w->taps && w->filters &&
         w->filter_slopes;
}

static int enter(work *w, int train) {
  const plan *p = w->p;
  const int64_t count = levels(w);
  int64_t dense = 0;
  w->values = calloc((size_t)count, sizeof(float *)), w->slopes = calloc((size_t)count, sizeof(float *));
  w->codes = calloc((size_t)p->layers, sizeof(void *)), w->vector = slack(p->parameters);
  int ready = w->values && w->slopes && w->codes && w->vector;
  for (int64_t i = 0; ready && i < count; i++) {
    w->values[i] = slack(i || w->layers[0].kind == DENSE ? p->batch * width_of(w, i) : 0);
    w->slopes[i] = slack(i && train ? p->batch * width_of(w, i) : 0);
    ready = w->values[i] && w->slopes[i];
  }
  for (int64_t i = 0; ready && i < p->layers; i++) {
    const layer *l = w->layers + i;
    if (l->kind == DENSE) dense = dense > l->inputs * whole(l->outputs) ? dense : l->inputs * whole(l->outputs);
    else ready = (w->codes[i] = malloc((size_t)(p->batch * l->outputs) * sizeof(int32_t))) != NULL;
  }
  ready = ready && (w->turned = slack(dense)) && (!is_text(w) || enter_text(w));
  if (!ready || !train) return ready;
  w->gradient = room(p->parameters + SLACK);
  if (w->layers[0].kind == IMAGE) w->mixed = slack(p->samples * conv_pool_mixed(&w->layers[0].image));
  return w->gradient && (w->layers[0].kind != IMAGE || w->mixed);
}

/* ---- words ---- */

INLINE const int64_t *words_of(const work *w, int64_t sample) {
  return (const int64_t *)w->x + sample * w->layers[0].inputs;
}

/* The filters in both orders that are needed: `taps` to multiply with words, `filters` for slopes. */
static void arrange(work *w) {
  float *patch = w->filters;
  for (int64_t i = 0, start = 0; has_next(w, i); i++) {
    const layer *l = w->layers + i;
    const int64_t block = whole(l->outputs);
    const float *from = w->vector + l->weight;
    for (int64_t f = 0; f < l->outputs; f++, patch += l->width * w->wide)
      for (int64_t c = 0; c < l->channels; c++)
        for (int64_t t = 0; t < l->width; t++, from++) {
          w->taps[c * w->stride + start + t * block + f] = *from;
          patch[t * w->wide + c] = *from;
        }
    start += l->width * block;
  }
}

/* Which words there are, and what each tap of each filter makes of them. */
static void look_up(work *w, const int64_t *which, int64_t count) {
  const layer *l = w->layers;
  for (int64_t u = 0; u < w->known; u++) w->number[w->list[u]] = 0;
  w->known = 0;
  for (int64_t n = 0; n < count; n++) {
    const int64_t *words = words_of(w, which[n]);
    for (int64_t i = 0; i < l->inputs; i++)
      if (!w->number[words[i]]) w->list[w->known++] = words[i], w->number[words[i]] = (int32_t)w->known;
  }
  for (int64_t u = 0; u < w->known; u++)
    memcpy(w->embedded + u * w->wide, w->vector + l->table + w->list[u] * l->channels, 4 * l->channels);
  multiply(w->known, w->stride, l->channels, w->embedded, w->wide, 1, w->taps, w->stride, NULL, w->answers, w->stride);
}

/* The largest of a vector of filters' answers along a line. */
INLINE void along(const float *const *rows, int64_t count, int64_t block, vec bias, vec *most, ints *place,
                  const int64_t taps) {
  for (int64_t i = 0; i < count; i++) {
    vec sum = bias;
    for (int64_t t = 0; t < taps; t++) sum += load(rows[i + t] + t * block);
    const ints more = above(*most, sum);
    *most = pick(more, sum, *most);
    *place = (more & (int32_t)i) | (*place & ~more);
  }
}

static void words_forward(work *w, const int64_t *which, int64_t count, int64_t width) {
  const int64_t places = w->layers[0].inputs;
  const float **at = w->at;
  for (int64_t n = 0; n < count; n++) {
    const int64_t *words = words_of(w, which[n]);
    int64_t end = places - 1; /* from here on one word fills the sample up, and all answers are the same */
    while (end && words[end - 1] == words[places - 1]) end--;
    for (int64_t i = 0; i < places; i++) w->rows[i] = w->answers + (w->number[words[i]] - 1) * w->stride;
    for (int64_t i = 0, start = 0; has_next(w, i); i++) {
      const layer *l = w->layers + i;
      const int64_t block = whole(l->outputs), sums = least(places - l->width, end) + 1;
      for (int64_t f = 0; f < l->outputs; f += LANES) {
        float bias[LANES] = {0};
        if (l->bias >= 0) memcpy(bias, w->vector + l->bias + f, 4 * least(LANES, l->outputs - f));
        vec most = (vec){0} - __builtin_inff();
        ints place = {0};
        for (int64_t k = 0; k < sums + l->width - 1; k++) at[k] = w->rows[k] + start + f;
#define TAPS(T) case T: along(at, sums, block, load(bias), &most, &place, T); break;
        switch (l->width) {
          TAPS(1) TAPS(2) TAPS(3) TAPS(4) TAPS(5)
          default: along(at, sums, block, load(bias), &most, &place, l->width);
        }
        for (int64_t k = 0; k < least(LANES, l->outputs - f); k++) {
          const int dead = most[k] <= 0;
          w->values[1][n * width + l->column + f + k] = dead ? 0 : most[k];
          ((int32_t *)w->codes[i])[n * l->outputs + f + k] = dead ? -1 : place[k];
        }
      }
      start += l->width * block;
    }
  }
}

/* to += from * factor, whole vectors */
INLINE void add(float *to, const float *from, float factor, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store(to + i, load(to + i) + load(from + i) * factor);
}

static void words_backward(work *w, const int64_t *which, int64_t count, int64_t width) {
  const layer *first = w->layers;
  memset(w->embedded_slopes, 0, 4 * w->known * w->wide);
  int64_t patch = 0;
  for (int64_t i = 0; has_next(w, i); i++) {
    const layer *l = w->layers + i;
    const int64_t size = l->width * w->wide;
    float *dw = w->filter_slopes + patch, *db = l->bias >= 0 ? w->gradient + l->bias : NULL;
    memset(dw, 0, 4 * l->outputs * size);
    if (db) memset(db, 0, 4 * l->outputs);
    for (int64_t n = 0; n < count; n++) {
      const int64_t *words = words_of(w, which[n]);
      const int32_t *where = (int32_t *)w->codes[i] + n * l->outputs;
      for (int64_t f = 0; f < l->outputs; f++) {
        const float slope = w->slopes[1][n * width + l->column + f];
        if (where[f] < 0) continue;
        if (db) db[f] += slope;
        for (int64_t t = 0; t < l->width; t++) {
          const int64_t word = (w->number[words[where[f] + t]] - 1) * w->wide, tap = f * size + t * w->wide;
          add(dw + tap, w->embedded + word, slope, w->wide);
          add(w->embedded_slopes + word, w->filters + patch + tap, slope, w->wide);
        }
      }
    }
    float *to = w->gradient + l->weight;
    for (int64_t f = 0; f < l->outputs; f++)
      for (int64_t c = 0; c < l->channels; c++)
        for (int64_t t = 0; t < l->width; t++) *to++ = dw[f * size + t * w->wide + c];
    patch += l->outputs * size;
  }
  for (int64_t u = 0; u < w->known; u++)
    memcpy(w->gradient + first->table + w->list[u] * first->channels, w->embedded_slopes + u * w->wide,
           4 * first->channels);
}

/* ---- all layers ---- */

static int forward(work *w, const int64_t *which, int64_t count) {
  for (int64_t i = 0; i < w->p->layers; i++) {
    const layer *l = w->layers + i;
    const float *from = w->values[l->level], *bias = l->bias >= 0 ? w->vector + l->bias : NULL;
    float *to = w->values[l->level + 1];
    if (l->kind == IMAGE) {
      shape s = l->image;
      s.samples = count;
      if (!conv_pool_of(&s, l->level ? NULL : which, l->level ? from : w->x, w->vector + l->weight, bias, to,
                        w->codes[i]))
        return 0;
    } else if (l->kind == WORDS) {
      if (i) continue; /* all of them at once */
      arrange(w), look_up(w, which, count), words_forward(w, which, count, width_of(w, 1));
    } else {
      const int64_t pitch = whole(l->outputs);
      for (int64_t n = 0; !l->level && n < count; n++)
        memcpy(w->values[0] + n * l->inputs, w->x + which[n] * l->inputs, 4 * l->inputs);
      turn(w->vector + l->weight, l->outputs, l->inputs, w->turned, pitch);
      multiply(count, l->outputs, l->inputs, from, l->inputs, 1, w->turned, pitch, bias, to, l->outputs);
      for (int64_t k = 0; l->relu && k < count * l->outputs; k++) to[k] = to[k] <= 0 ? 0 : to[k];
    }
  }
  return 1;
}

static int backward(work *w, const int64_t *which, int64_t count) {
  for (int64_t i = w->p->layers - 1; i >= 0; i--) {
    const layer *l = w->layers + i;
    const float *from = w->values[l->level], *weight = w->vector + l->weight;
    float *slopes = w->slopes[l->level + 1], *back = l->level ? w->slopes[l->level] : NULL;
    float *dw = w->gradient + l->weight, *db = l->bias >= 0 ? w->gradient + l->bias : NULL;
    if (l->kind == IMAGE) {
      shape s = l->image;
      s.samples = count;
      if (!conv_pool_slopes_of(&s, l->level ? NULL : which, from, l->level ? NULL : w->mixed, weight, slopes,
                               w->codes[i], dw, db, back))
        return 0;
    } else if (l->kind == WORDS) {
      if (!i) words_backward(w, which, count, width_of(w, 1));
    } else {
      const float *after = w->values[l->level + 1];
      for (int64_t k = 0; l->relu && k < count * l->outputs; k++) slopes[k] = after[k] <= 0 ? 0 : slopes[k];
      multiply(l->outputs, l->inputs, count, slopes, 1, l->outputs, from, l->inputs, NULL, dw, l->inputs);
      if (db) {
        memset(db, 0, 4 * l->outputs);
        for (int64_t n = 0; n < count; n++)
          for (int64_t o = 0; o < l->outputs; o++) db[o] += slopes[n * l->outputs + o];
      }
      if (back) multiply(count, l->inputs, l->outputs, slopes, l->outputs, 1, weight, l->inputs, NULL, back, l->inputs);
    }
  }
  return 1;
}

/* The mean cross entropy of a mini-batch, and its slopes. */
static double loss_of(const work *w, const int64_t *y, const int64_t *which, int64_t count) {
  const int64_t last = levels(w) - 1, classes = width_of(w, last);
  double total = 0;
  for (int64_t n = 0; n < count; n++) {
    const float *said = w->values[last] + n * classes;
    float *slopes = w->slopes[last] + n * classes, most = said[0], sum = 0;
    for (int64_t c = 1; c < classes; c++) most = said[c] > most ? said[c] : most;
    for (int64_t c = 0; c < classes; c++) sum += slopes[c] = expf(said[c] - most);
    for (int64_t c = 0; c < classes; c++) slopes[c] = (slopes[c] / sum - (c == y[which[n]])) / (float)count;
    total += logf(sum) + (most - said[y[which[n]]]);
  }
  return total / (double)count;
}

/* ---- the step ---- */

typedef struct {
  const float *anchor, *mask;
  float scale;
} pull;

INLINE float slope_at(const work *w, const pull *q, int64_t i) {
  float g = w->gradient[i];
  if (q->anchor) g += w->p->proximal * (w->vector[i] - q->anchor[i]);
  if (w->p->weight_decay != 0) g += w->p->weight_decay * w->vector[i]; /* weights may be infinite */
  return q->mask ? g * q->mask[i] : g;
}

static double square(work *w, const pull *q, int64_t from, int64_t to) {
  double total = 0;
  for (int64_t i = from; i < to; i += 256) {
    float part[LANES] = {0};
    for (int64_t k = i; k < least(to, i + 256); k++) {
      const float g = slope_at(w, q, k);
      part[(k - i) % LANES] += g * g;
    }
    for (int k = 0; k < LANES; k++) total += part[k];
  }
  return total;
}

INLINE void step_with(work *w, const pull *q, int64_t from, int64_t to, const int pulled, const int masked,
                      const int heavy) {
  float *restrict vector = w->vector, *restrict velocity = w->velocity;
  const float *restrict gradient = w->gradient, *restrict anchor = q->anchor, *restrict mask = q->mask;
  const float lr = w->p->lr, mu = w->p->proximal, decay = w->p->weight_decay, momentum = w->p->momentum;
  const float scale = q->scale;
  for (int64_t i = from; i < to; i++) {
    float g = gradient[i];
    if (decay != 0) g += decay * vector[i];
    if (pulled) g += mu * (vector[i] - anchor[i]);
    if (masked) g *= mask[i];
    g *= scale;
    if (heavy) g = velocity[i] = momentum * velocity[i] + g;
    vector[i] -= lr * g;
  }
}

static double move(work *w, const pull *q, int64_t from, int64_t to) {
  const int heavy = w->velocity != NULL;
#define STEP(A, M, H) step_with(w, q, from, to, A, M, H)
  if (q->anchor) q->mask ? heavy ? STEP(1, 1, 1) : STEP(1, 1, 0) : heavy ? STEP(1, 0, 1) : STEP(1, 0, 0);
  else q->mask ? heavy ? STEP(0, 1, 1) : STEP(0, 1, 0) : heavy ? STEP(0, 0, 1) : STEP(0, 0, 0);
  return 0;
}

/* Measures or moves what a step may change: all weights, or of a table of words, where nothing but the loss moves them,
 * those that were seen. */
static double over(work *w, const pull *q, double (*part)(work *, const pull *, int64_t, int64_t)) {
  const layer *l = w->layers;
  if (!is_text(w) || w->velocity || w->p->weight_decay != 0 || q->anchor) return part(w, q, 0, w->p->parameters);
  double total = part(w, q, 0, l->table) + part(w, q, l->table + l->words * l->channels, w->p->parameters);
  for (int64_t u = 0; u < w->known; u++) {
    const int64_t row = l->table + w->list[u] * l->channels;
    total += part(w, q, row, row + l->channels);
  }
  return total;
}

static void step(work *w, const float *anchor, const float *mask) {
  pull q = {w->p->proximal != 0 ? anchor : NULL, mask, 1};
  if (w->p->clip_norm >= 0) {
    const double scale = w->p->clip_norm / (sqrt(over(w, &q, square)) + 1e-12);
    q.scale = scale > 1 ? 1 : (float)scale;
  }
  over(w, &q, move);
  for (int64_t u = 0; u < w->known; u++)
    memset(w->gradient + w->layers[0].table + w->list[u] * w->layers[0].channels, 0, 4 * w->layers[0].channels);
}

/* ---- what is called ---- */

/* Changes `vector` and `velocity` [parameters]; without momentum the latter is NULL. `order` [steps, batch]: numbers of
 * samples, -1 fills up; a step without any is none. `anchor` and `mask` may be NULL; `first`, unless it is, gets the
 * first mini-batch's gradient. `losses`: that of the first mini-batch, and the sum of all. Returns 0 where memory is
 * lacking. */
int chain_train(const layer *layers, const plan *p, const void *x, const int64_t *y, const int64_t *order,
                float *vector, float *velocity, const float *anchor, const float *mask, float *first, double *losses) {
  work w = {.layers = layers, .p = p, .x = x, .velocity = velocity};
  int ready = enter(&w, 1);
  if (ready) memcpy(w.vector, vector, 4 * p->parameters);
  if (ready && w.mixed)
    for (int64_t n = 0; n < p->samples; n++)
      conv_pool_mix(&layers[0].image, w.x + n * layers[0].inputs, w.mixed + n * conv_pool_mixed(&layers[0].image));
  losses[0] = losses[1] = 0;
  for (int64_t i = 0; ready && i < p->steps; i++) {
    const int64_t *which = order + i * p->batch;
    int64_t count = 0;
    while (count < p->batch && which[count] >= 0) count++;
    if (!count) continue;
    double loss = 0;
    ready = forward(&w, which, count) && ((loss = loss_of(&w, y, which, count)), backward(&w, which, count));
    if (!ready) break;
    if (!i) losses[0] = loss;
    if (!i && first)
      for (int64_t k = 0; k < p->parameters; k++) first[k] = mask ? w.gradient[k] * mask[k] : w.gradient[k];
    losses[1] += loss;
    step(&w, anchor, mask);
  }
  if (ready) memcpy(vector, w.vector, 4 * p->parameters);
  leave(&w);
  return ready;
}

/* What a network says to samples of x: `said` [batch, classes], `which` [batch]. */
int chain_run(const layer *layers, const plan *p, const void *x, const int64_t *which, const float *vector,
              float *said) {
  work w = {.layers = layers, .p = p, .x = x};
  int ready = enter(&w, 0);
  if (ready) memcpy(w.vector, vector, 4 * p->parameters);
  ready = ready && forward(&w, which, p->batch);
  if (ready) memcpy(said, w.values[levels(&w) - 1], 4 * p->batch * width_of(&w, levels(&w) - 1));
  leave(&w);
  return ready;
}
