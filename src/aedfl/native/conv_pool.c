/* relu(max_pool2d(conv2d(x, w, b), 2)) on one thread, and its gradients.
 *
 * What is left of four answers of a filter is the largest one, and nothing of it if it is not above zero. So the
 * answers themselves are never written down, and a slope belongs to one place or none: gradients are gathered there,
 * at an eighth of the places or so, instead of being convolved.
 *
 * Arrays are contiguous: x [n, c, h, w], filters [f, c, k, l], y and where [n, f, ph, pw]. `where` says which of the
 * four was the largest (0 to 3, row by row; the first of equals), or DEAD. Sums run in a fixed order. A number that is
 * none goes through to y, as in PyTorch; infinite slopes may make more of the gradients no numbers than there.
 */

#include "conv_pool.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define TILE (SUMS / 4) /* filters at a time, with two vectors of columns in each of two rows */
#define DEAD 4
#define SLACK (4 * LANES) /* behind an image: the last vectors of a row or a patch reach beyond it, and are not used */
#define SEGMENTS 5 /* vectors of a filter's gradient that are summed at a time */

#if LANES == 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#endif
#ifdef __clang__
#define EVEN(a, b) __builtin_shufflevector(a, b, EVENS)
#define ODD(a, b) __builtin_shufflevector(a, b, ODDS)
#else /* older GCCs know this one alone */
#define EVEN(a, b) __builtin_shuffle(a, b, (ints){EVENS})
#define ODD(a, b) __builtin_shuffle(a, b, (ints){ODDS})
#endif

INLINE int64_t high(const shape *s) { return s->height + 2 * s->over; }
INLINE int64_t wide(const shape *s) { return s->width + 2 * s->left; }
INLINE int64_t pooled_rows(const shape *s) { return (high(s) - s->rows + 1) / 2; }
INLINE int64_t pooled_columns(const shape *s) { return (wide(s) - s->columns + 1) / 2; }

/* The largest of four vectors, after the ReLU, and its number. */
INLINE vec largest(const vec four[4], ints *code) {
  vec most = four[0];
  ints which = {0};
  for (int i = 1; i < 4; i++) {
    ints more = above(most, four[i]);
    most = pick(more, four[i], most);
    which = (more & i) | (which & ~more);
  }
  ints dead = most <= 0;
  *code = (dead & DEAD) | (which & ~dead);
  return pick(~dead, most, (vec){0});
}

INLINE void keep(float *y, uint8_t *where, vec most, ints code, int64_t count, int64_t apart) {
  float values[LANES];
  int32_t codes[LANES];
  memcpy(values, &most, sizeof values);
  memcpy(codes, &code, sizeof codes);
  if (count == LANES && apart == 1) { /* constants, so that these become single moves */
    for (int64_t i = 0; i < LANES; i++) y[i] = values[i], where[i] = (uint8_t)codes[i];
    return;
  }
  for (int64_t i = 0; i < count; i++) y[i * apart] = values[i], where[i * apart] = (uint8_t)codes[i];
}

/* Few filters: the lanes are columns of the image. `w` [taps, tile]; `at` is the image's first row of this pair. */
INLINE void columns_tile(const shape *s, const float *at, const float *w, const float *bias, float *y, uint8_t *where,
                         int64_t count, const int tile, const int vectors) {
  const int64_t pitch = wide(s), plane = high(s) * pitch, cells = pooled_rows(s) * pooled_columns(s);
  vec sums[TILE * 2][2][2];
#pragma GCC unroll 12
  for (int f = 0; f < tile; f++)
    for (int r = 0; r < 2; r++)
      for (int v = 0; v < vectors; v++) sums[f][r][v] = (vec){0} + bias[f];
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t i = 0; i < s->rows; i++) {
      const float *row = at + c * plane + i * pitch;
      for (int64_t j = 0; j < s->columns; j++, row++, w += tile) {
        vec x[2][2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) x[0][v] = load(row + v * LANES), x[1][v] = load(row + pitch + v * LANES);
#pragma GCC unroll 12
        for (int f = 0; f < tile; f++)
#pragma GCC unroll 2
          for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sums[f][r][v] += x[r][v] * w[f];
      }
    }
#pragma GCC unroll 12
  for (int f = 0; f < tile; f++) {
    const int last = vectors - 1;
    vec four[4] = {EVEN(sums[f][0][0], sums[f][0][last]), ODD(sums[f][0][0], sums[f][0][last]),
                   EVEN(sums[f][1][0], sums[f][1][last]), ODD(sums[f][1][0], sums[f][1][last])};
    ints code;
    vec most = largest(four, &code);
    keep(y + f * cells, where + f * cells, most, code, count, 1);
  }
}

/* Filters whose sums are held at a time where lanes are columns: twice as many where one vector is enough for a row. */
INLINE int tile_of(const shape *s) { return 2 * pooled_columns(s) > LANES ? TILE : 2 * TILE; }

static void by_columns(const shape *s, const float *image, const float *w, const float *bias, float *y,
                       uint8_t *where) {
  const int64_t taps = s->channels * s->rows * s->columns, pr = pooled_rows(s), pc = pooled_columns(s);
  const int block = tile_of(s), wider = block == TILE;
  const int64_t step = wider ? LANES : LANES / 2; /* pooled columns at a time */
  for (int64_t f = 0; f < s->filters; f += block) {
    const int tile = (int)least(block, s->filters - f);
    for (int64_t r = 0; r < pr; r++)
      for (int64_t p = 0; p < pc; p += step) {
        const float *at = image + 2 * r * wide(s) + 2 * p;
        const int64_t to = (f * pr + r) * pc + p, count = least(step, pc - p);
        const float *part = w + f * taps;
#define CASE(T, V) case T: columns_tile(s, at, part, bias + f, y + to, where + to, count, T, V); break;
        if (wider) switch (tile) {
            CASE(1, 2) CASE(2, 2) CASE(3, 2)
#if TILE > 3
            CASE(4, 2) CASE(5, 2) CASE(6, 2)
#endif
        } else switch (tile) {
            CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if TILE > 3
            CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
#endif
        }
#undef CASE
      }
  }
}

/* Many filters: the lanes are filters. `w` [taps, LANES]; so many pooled cells side by side. */
INLINE void filters_tile(const shape *s, const float *at, const float *w, vec bias, float *y, uint8_t *where,
                         int64_t count, const int cells) {
  const int64_t pitch = wide(s), plane = high(s) * pitch, apart = pooled_rows(s) * pooled_columns(s);
  vec sums[2][2 * TILE];
#pragma GCC unroll 12
  for (int j = 0; j < 2 * cells; j++) sums[0][j] = sums[1][j] = bias;
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t i = 0; i < s->rows; i++) {
      const float *upper = at + c * plane + i * pitch, *lower = upper + pitch;
      for (int64_t k = 0; k < s->columns; k++, upper++, lower++, w += LANES) {
        const vec factors = load(w);
#pragma GCC unroll 12
        for (int j = 0; j < 2 * cells; j++) sums[0][j] += upper[j] * factors, sums[1][j] += lower[j] * factors;
      }
    }
#pragma GCC unroll 6
  for (int p = 0; p < cells; p++) {
    vec four[4] = {sums[0][2 * p], sums[0][2 * p + 1], sums[1][2 * p], sums[1][2 * p + 1]};
    ints code;
    vec most = largest(four, &code);
    keep(y + p, where + p, most, code, count, apart);
  }
}

static void by_filters(const shape *s, const float *image, const float *w, const float *bias, float *y,
                       uint8_t *where) {
  const int64_t taps = s->channels * s->rows * s->columns, pr = pooled_rows(s), pc = pooled_columns(s);
  const int64_t parts = (pc + TILE - 1) / TILE;
  for (int64_t f = 0; f < s->filters; f += LANES)
    for (int64_t r = 0; r < pr; r++)
      for (int64_t part = 0; part < parts; part++) {
        const int64_t p = pc * part / parts, cells = pc * (part + 1) / parts - p;
        const float *at = image + 2 * r * wide(s) + 2 * p;
        const int64_t to = (f * pr + r) * pc + p, count = least(LANES, s->filters - f);
#define CASE(T) case T: filters_tile(s, at, w + f * taps, load(bias + f), y + to, where + to, count, T); break;
        switch (cells) {
          CASE(1) CASE(2) CASE(3)
#if TILE > 3
          CASE(4) CASE(5) CASE(6)
#endif
        }
#undef CASE
      }
}

/* The image with its border, channel by channel. */
static void frame(const shape *s, const float *x, float *image) {
  const int64_t pitch = wide(s);
  if (!s->over && !s->left) {
    memcpy(image, x, 4 * s->channels * s->height * s->width);
    return;
  }
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t r = 0; r < s->height; r++)
      memcpy(image + (c * high(s) + r + s->over) * pitch + s->left, x + (c * s->height + r) * s->width, 4 * s->width);
}

/* Whether lanes are filters: whichever way fewer of them idle. */
static int filters_in_lanes(const shape *s) {
  const int64_t columns = 2 * pooled_columns(s), block = columns > LANES ? 2 * LANES : LANES;
  return s->filters * ((columns + block - 1) / block * block) > columns * whole(s->filters);
}

int conv_pool_of(const shape *s, const int64_t *which, const float *x, const float *w, const float *bias, float *y,
                 uint8_t *where) {
  const int64_t taps = s->channels * s->rows * s->columns, size = s->channels * s->height * s->width;
  const int64_t answers = s->filters * pooled_rows(s) * pooled_columns(s);
  const int filters = filters_in_lanes(s);
  const int64_t block = filters ? LANES : tile_of(s);
  float *image = room(s->channels * high(s) * wide(s) + SLACK), *packed = room(taps * whole(s->filters));
  float *shift = room(whole(s->filters));
  const int ready = image && packed && shift;
  if (ready) {
    if (bias) memcpy(shift, bias, 4 * s->filters);
    for (int64_t f = 0; f < s->filters; f++) { /* blocks of filters, tap by tap */
      const int64_t first = f / block * block, many = filters ? LANES : least(block, s->filters - first);
      for (int64_t t = 0; t < taps; t++) packed[first * taps + t * many + f - first] = w[f * taps + t];
    }
    for (int64_t n = 0; n < s->samples; n++) {
      frame(s, x + (which ? which[n] : n) * size, image);
      (filters ? by_filters : by_columns)(s, image, packed, shift, y + n * answers, where + n * answers);
    }
  }
  free(image), free(packed), free(shift);
  return ready;
}

int conv_pool(const shape *s, const float *x, const float *w, const float *bias, float *y, uint8_t *where) {
  return conv_pool_of(s, NULL, x, w, bias, y, where);
}

/* For gradients an image has the channels of a pixel side by side, so that a row of a filter's patch is one piece of
 * memory: `line` numbers with what fills the last vector up, which counts for nothing. */
typedef struct {
  int64_t pitch, pixels, line, filter, vectors, cells, steps[DEAD]; /* steps: from a cell's first place to the others */
  int64_t *starts; /* where each vector of a patch begins in an image, from the patch's first number */
} pieces;

static pieces cut(const shape *s) {
  const int64_t pitch = wide(s) * s->channels, line = whole(s->columns * s->channels), filter = s->rows * line;
  return (pieces){pitch, high(s) * pitch + SLACK, line, filter, filter / LANES, pooled_rows(s) * pooled_columns(s),
                  {0, s->channels, pitch, pitch + s->channels}, NULL};
}

INLINE int64_t first_place(const shape *s, const pieces *p, int64_t row, int64_t column) {
  return 2 * (row * p->pitch + column * s->channels);
}

/* Where a row of a channel begins in an image. */
INLINE int64_t row_of(const shape *s, const pieces *p, int64_t channel, int64_t row) {
  return (row + s->over) * p->pitch + s->left * s->channels + channel;
}

static void mix(const shape *s, const pieces *p, const float *x, float *image) {
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t r = 0; r < s->height; r++, x += s->width)
      for (int64_t k = 0; k < s->width; k++) image[row_of(s, p, c, r) + k * s->channels] = x[k];
}

static void unmix(const shape *s, const pieces *p, const float *image, float *x) {
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t r = 0; r < s->height; r++, x += s->width)
      for (int64_t k = 0; k < s->width; k++) x[k] = image[row_of(s, p, c, r) + k * s->channels];
}

/* For every weight, in the order of filters: `i` is its place there, `j` that among patches. */
#define EACH_WEIGHT(DO) \
  for (int64_t f = 0, i = 0; f < s->filters; f++) \
    for (int64_t c = 0; c < s->channels; c++) \
      for (int64_t r = 0; r < s->rows; r++) \
        for (int64_t k = 0, j = f * p->filter + r * p->line + c; k < s->columns; k++, i++, j += s->channels) DO;

/* The places of one filter that have a slope, and their slopes, filled up with zeros to a whole vector. `corners` has
 * each cell's first place. No branches: which are dead cannot be foreseen. */
static int64_t alive(const pieces *p, const int32_t *corners, const float *g, const uint8_t *where, int32_t *at,
                     float *slopes) {
  int64_t count = 0, cell = 0;
#ifdef __AVX512F__
  int32_t table[16] = {0};
  for (int code = 0; code < DEAD; code++) table[code] = (int32_t)p->steps[code];
  const __m512i steps = _mm512_loadu_si512(table), dead = _mm512_set1_epi32(DEAD);
  for (; cell + 16 <= p->cells; cell += 16) {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(where + cell)));
    const __mmask16 some = _mm512_cmpneq_epi32_mask(codes, dead);
    const __m512i places = _mm512_add_epi32(_mm512_loadu_si512(corners + cell), _mm512_permutexvar_epi32(codes, steps));
    _mm512_storeu_si512(at + count, _mm512_maskz_compress_epi32(some, places));
    _mm512_storeu_ps(slopes + count, _mm512_maskz_compress_ps(some, _mm512_loadu_ps(g + cell)));
    count += __builtin_popcount(some);
  }
#endif
  for (; cell < p->cells; cell++) {
    const uint8_t code = where[cell];
    at[count] = corners[cell] + (int32_t)p->steps[code % DEAD];
    slopes[count] = g[cell];
    count += code != DEAD;
  }
  for (int64_t i = count; i < whole(count); i++) slopes[i] = 0;
  return count;
}

INLINE float sum(const float *values, int64_t count) {
  vec total = {0};
  for (int64_t i = 0; i < count; i += LANES) total += load(values + i);
  float found = 0;
  for (int i = 0; i < LANES; i++) found += total[i];
  return found;
}

#define BY_SEGMENTS(CALL) \
  switch (least(SEGMENTS, p->vectors - v)) { \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    case 4: CALL(4); break; \
    default: CALL(5); \
  }

/* From its v-th vector on, a filter's gradient: each of its patches times the slope there. */
INLINE void gather(const pieces *p, const float *image, int64_t v, const int32_t *at, const float *slopes,
                   int64_t count, float *sums, const int many) {
  vec total[SEGMENTS];
  const float *from[SEGMENTS];
#pragma GCC unroll 5
  for (int i = 0; i < many; i++) total[i] = load(sums + (v + i) * LANES), from[i] = image + p->starts[v + i];
  for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 5
    for (int i = 0; i < many; i++) total[i] += load(from[i] + at[k]) * slopes[k];
#pragma GCC unroll 5
  for (int i = 0; i < many; i++) store(sums + (v + i) * LANES, total[i]);
}

/* From its v-th vector on, a patch of the input's gradient: filters that have their largest answer there. Where a row
 * of a patch is longer than one of the image, vectors overlap; they are stored in their order, and what fills a later
 * one's predecessor up has added zero. */
INLINE void spread(const pieces *p, const float *patches, int64_t v, const int32_t *who, int64_t count,
                   const float *slopes, float *back, const int many) {
  vec total[SEGMENTS];
#pragma GCC unroll 5
  for (int i = 0; i < many; i++) total[i] = load(back + p->starts[v + i]);
  for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 5
    for (int i = 0; i < many; i++)
      total[i] += load(patches + who[k] * p->filter + (v + i) * LANES) * slopes[who[k] * p->cells];
#pragma GCC unroll 5
  for (int i = 0; i < many; i++) store(back + p->starts[v + i], total[i]);
}

/* The gradient of one image, place by place, for few reads and writes of it. `lists` [DEAD + 1, filters]. */
static void by_input(const shape *s, const pieces *p, const float *patches, const float *g, const uint8_t *where,
                     int32_t *lists, float *back) {
  for (int64_t r = 0, cell = 0; r < pooled_rows(s); r++)
    for (int64_t c = 0; c < pooled_columns(s); c++, cell++) {
      int64_t counts[DEAD + 1] = {0};
      for (int64_t f = 0; f < s->filters; f++) {
        const uint8_t code = where[f * p->cells + cell];
        lists[code * s->filters + counts[code]++] = (int32_t)f;
      }
      for (int code = 0; code < DEAD; code++) {
        float *to = back + first_place(s, p, r, c) + p->steps[code];
        const int32_t *who = lists + code * s->filters;
        for (int64_t v = 0; counts[code] && v < p->vectors; v += SEGMENTS) {
#define CALL(MANY) spread(p, patches, v, who, counts[code], g + cell, to, MANY)
          BY_SEGMENTS(CALL)
#undef CALL
        }
      }
    }
}

static void by_filter(const pieces *p, const float *image, const int32_t *at, const float *slopes, int64_t count,
                      float *sums) {
  for (int64_t v = 0; v < p->vectors; v += SEGMENTS) {
#define CALL(MANY) gather(p, image, v, at, slopes, count, sums, MANY)
    BY_SEGMENTS(CALL)
#undef CALL
  }
}

int64_t conv_pool_mixed(const shape *s) { return cut(s).pixels; }

void conv_pool_mix(const shape *s, const float *x, float *mixed) {
  const pieces p = cut(s);
  memset(mixed, 0, 4 * p.pixels);
  mix(s, &p, x, mixed);
}

int conv_pool_slopes_of(const shape *s, const int64_t *which, const float *x, const float *mixed, const float *w,
                        const float *g, const uint8_t *where, float *dw, float *db, float *dx) {
  pieces given = cut(s), *const p = &given;
  const int64_t size = s->channels * s->height * s->width, answers = s->filters * p->cells;
  float *image = room(p->pixels), *slopes = room(whole(p->cells) + LANES), *sums = room(s->filters * p->filter);
  float *patches = room(s->filters * p->filter), *back = room(p->pixels);
  int32_t *at = (int32_t *)room(p->cells + LANES), *corners = (int32_t *)room(p->cells);
  int32_t *lists = (int32_t *)room((DEAD + 1) * s->filters);
  p->starts = malloc((size_t)p->vectors * sizeof *p->starts);
  const int ready = image && slopes && sums && patches && back && at && corners && lists && p->starts;
  if (ready) {
    for (int64_t v = 0; v < p->vectors; v++)
      p->starts[v] = v * LANES / p->line * p->pitch + v * LANES % p->line;
    for (int64_t r = 0, cell = 0; r < pooled_rows(s); r++)
      for (int64_t c = 0; c < pooled_columns(s); c++) corners[cell++] = (int32_t)first_place(s, p, r, c);
    EACH_WEIGHT(patches[j] = w[i])
    if (db) memset(db, 0, 4 * s->filters);
    for (int64_t n = 0; n < s->samples; n++) {
      const int64_t source = which ? which[n] : n;
      const float *from = mixed ? mixed + source * p->pixels : image;
      if (!mixed) mix(s, p, x + source * size, image);
      for (int64_t f = 0; f < s->filters; f++) {
        const int64_t first = n * answers + f * p->cells, count = alive(p, corners, g + first, where + first, at, slopes);
        if (db) db[f] += sum(slopes, count);
        by_filter(p, from, at, slopes, count, sums + f * p->filter);
      }
      if (!dx) continue;
      memset(back, 0, 4 * p->pixels);
      by_input(s, p, patches, g + n * answers, where + n * answers, lists, back);
      unmix(s, p, back, dx + n * size);
    }
    EACH_WEIGHT(dw[i] = sums[j])
  }
  free(image), free(slopes), free(sums), free(patches), free(back), free(at);
  free(corners), free(lists), free(p->starts);
  return ready;
}

int conv_pool_slopes(const shape *s, const float *x, const float *w, const float *g, const uint8_t *where, float *dw,
                     float *db, float *dx) {
  return conv_pool_slopes_of(s, NULL, x, NULL, w, g, where, dw, db, dx);
}
