/* relu(max_pool2d(conv2d(x, w, b), 2)) and its gradients: see conv_pool.c. All return 0 where memory is lacking. */

#pragma once

#include "vectors.h"

typedef struct {
  int64_t samples, channels, height, width, filters, rows, columns, over, left; /* rows and columns of a filter */
} shape;

/* For the samples x[which[0]], x[which[1]] … instead of the first ones, unless `which` is NULL. */
int conv_pool_of(const shape *s, const int64_t *which, const float *x, const float *w, const float *bias, float *y,
                 uint8_t *where);

/* Gradients by the filters, the bias and the input, each unless it is NULL: written, not added to what is there. Images
 * that are seen often can be brought into the order of memory that is needed here once: all of them are in `mixed`
 * then, `conv_pool_mixed` numbers each, made by `conv_pool_mix`. */
int conv_pool_slopes_of(const shape *s, const int64_t *which, const float *x, const float *mixed, const float *w,
                        const float *g, const uint8_t *where, float *dw, float *db, float *dx);
int64_t conv_pool_mixed(const shape *s);
void conv_pool_mix(const shape *s, const float *x, float *mixed);
