/* Vector types and helpers that all kernels share.

   Written with the vector extensions of GCC, so that one source serves every processor: vectors of eight floats with
   AVX2 and FMA, of four elsewhere. No compiler option that ignores NaN or infinity is used: values that are not finite
   must show in the results. Every result depends on its own inputs alone: neither the number of threads nor the rest of
   the work in the same call changes a bit of it. */
#ifndef KEEL_SIMD_H
#define KEEL_SIMD_H

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

/* aligned(4): tensors may start at any float */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Keep a value in its register. Otherwise GCC reads it from memory at each use, and loads limit the speed. */
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(value) __asm__("" : "+w"(value))
#else
#define KEEP_IN_REGISTER(value)
#endif

/* Work above which other threads are used, in multiplications or in floats copied: about ten microseconds of one
   thread, less than which waking the others does not pay. */
#define PARALLEL_FLOPS 400000
#define PARALLEL_COPIES 100000

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vec load(const float *address) { return *(const vec *)address; }
INLINE void store(float *address, vec value) { *(vec *)address = value; }
INLINE vec broadcast(float value) { return value - (vec){0}; }

/* if_true where the lane of `condition` is all ones, if_false where it is zero */
INLINE vec blend(ivec condition, vec if_true, vec if_false) {
    return (vec)(((ivec)if_true & condition) | ((ivec)if_false & ~condition));
}

INLINE float sum_lanes(vec value) {
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

/* e^x to about two units in the last place; 0 below -87.4, infinity above 88.8, NaN for NaN */
INLINE vec vexp(vec x) {
    const vec upper = broadcast(88.8f), lower = broadcast(-87.4f);
    ivec overflow = x > upper, underflow = x < lower;
    vec clamped = blend(overflow, upper, blend(underflow, lower, x));
    vec shifted = clamped * 1.44269504f + 12582912.0f; /* leaves the nearest integer in the low bits */
    vec integer = shifted - 12582912.0f;
    vec remainder = clamped - integer * 0.693359375f + integer * 2.12194440e-4f;
    vec power = broadcast(1.9875691500e-4f);
    power = power * remainder + 1.3981999507e-3f;
    power = power * remainder + 8.3334519073e-3f;
    power = power * remainder + 4.1665795894e-2f;
    power = power * remainder + 1.6666665459e-1f;
    power = power * remainder + 5.0000001201e-1f;
    power = power * remainder * remainder + remainder + 1.0f;
    /* 2^128 does not fit one exponent, so multiply by two powers of half the exponent */
    ivec exponent = (ivec)shifted - 0x4B400000;
    ivec half = exponent >> 1;
    vec scaled = power * (vec)((half + 127) << 23) * (vec)((exponent - half + 127) << 23);
    vec result = blend(underflow, broadcast(0.0f), blend(overflow, broadcast(INFINITY), scaled));
    return blend(x == x, result, x);
}

#endif
