/* What the kernels share: vectors of floats, rows of tiles, exp.

   Written with the vector extensions of GCC, so that one text serves every processor: eight floats at once where there
   is AVX2 with FMA, four elsewhere. No option that gives up NaN or infinity is used: what is not finite must show.
   Every result is a function of its own inputs alone: neither the number of threads nor what else is computed in the
   same call changes a bit of it. */
#ifndef KEEL_COMMON_H
#define KEEL_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <omp.h>

#if defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif

/* may stand at any float, as tensors do */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* a value that stays in its register: else GCC reads it from memory at each use, and loads become the limit */
#if defined(__x86_64__)
#define HOLD(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define HOLD(value) __asm__("" : "+w"(value))
#else
#define HOLD(value)
#endif

/* multiplications, or numbers moved, that are worth waking other threads for: about ten microseconds of one */
#define WORTH 400000
#define MOVES 100000

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vec load(const float *place) { return *(const vec *)place; }
INLINE void store(float *place, vec value) { *(vec *)place = value; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec pick(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

INLINE float sum(vec value) {
#if LANES == 8
    value += __builtin_shuffle(value, (ivec){4, 5, 6, 7, 0, 1, 2, 3});
    value += __builtin_shuffle(value, (ivec){2, 3, 0, 1, 6, 7, 4, 5});
    value += __builtin_shuffle(value, (ivec){1, 0, 3, 2, 5, 4, 7, 6});
#else
    value += __builtin_shuffle(value, (ivec){2, 3, 0, 1});
    value += __builtin_shuffle(value, (ivec){1, 0, 3, 2});
#endif
    return value[0];
}

/* e^x to about two units in the last place; 0 far below, inf far above, NaN of NaN */
INLINE vec vexp(vec x) {
    const vec top = all(88.8f), bottom = all(-87.4f);
    ivec over = x > top, under = x < bottom;
    vec held = pick(over, top, pick(under, bottom, x));
    vec shifted = held * 1.44269504f + 12582912.0f; /* the nearest whole number, in the low bits */
    vec whole = shifted - 12582912.0f;
    vec rest = held - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec power = all(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    /* 2^128 does not fit one exponent, so half of it twice */
    ivec exponent = (ivec)shifted - 0x4B400000;
    ivec half = exponent >> 1;
    vec scaled = power * (vec)((half + 127) << 23) * (vec)((exponent - half + 127) << 23);
    vec found = pick(under, all(0.0f), pick(over, all(INFINITY), scaled));
    return pick(x == x, found, x);
}

#endif
