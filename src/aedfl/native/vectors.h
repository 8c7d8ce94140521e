/* Vectors as wide as the processor's registers, and small things that kernels share. */

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define SUMS 24 /* vectors that are held as sums while others pass by: of 32 registers, or of 16 */
#elif defined(__AVX__)
#define LANES 8
#define SUMS 12
#else
#define LANES 4
#define SUMS 12
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
#define ALIGNED 64 /* bytes: a line of the cache, and the longest vector */
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec pick(ints which, vec yes, vec no) { return (vec)(((ints)yes & which) | ((ints)no & ~which)); }

/* Where the second is larger, or no number: what is none is to be seen in the end. */
INLINE ints above(vec most, vec other) { return (other > most) | (other != other); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Room for so many numbers, on a boundary of vectors, or NULL. */
INLINE float *space(int64_t count) {
  const size_t bytes = ((size_t)count * sizeof(float) / ALIGNED + 1) * ALIGNED;
  return aligned_alloc(ALIGNED, bytes);
}

/* So many zeros, or NULL. */
INLINE float *room(int64_t count) {
  float *found = space(count);
  return found ? memset(found, 0, (size_t)count * sizeof(float)) : NULL;
}
