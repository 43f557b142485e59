// Vectors of 16 numbers, which the weights, keys and values of a model are read into, whatever they are kept in.
//
// They are the compiler's own, so the source is for any CPU; what is one register with AVX-512 is two with AVX2.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;  // numbers in a vector: rows of weights and heads are multiples of it
constexpr double LOG2_E = 1.4426950408889634;

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t Codes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));

struct BFloat16 {
    uint16_t bits;
};

inline Vector load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
#ifdef __AVX512F__  // what the compiler makes of the other branch takes three times as many instructions
inline Vector load(const BFloat16* at) {
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
}
inline Vector load(const int8_t* at) {
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
}
#else
inline Vector load(const BFloat16* at) {
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16);
}
inline Vector load(const int8_t* at) {
    auto halves = __builtin_convertvector(*reinterpret_cast<const Codes*>(at), Shorts);  // GCC doubles in a step
    return __builtin_convertvector(__builtin_convertvector(halves, Integers), Vector);
}
#endif

inline void store(float* at, float value) { *at = value; }
inline void store(BFloat16* at, float value) {  // to the nearest, of two the even one; NaN stays NaN
    uint32_t word;
    memcpy(&word, &value, 4);
    at->bits = value != value ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

inline void store(float* at, Vector values) { *reinterpret_cast<Floats*>(at) = values; }

inline float sum(Vector v) {
    v += __builtin_shuffle(v, (Integers){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (Integers){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (Integers){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

// 2^x for x <= 0, off by some units in the last place: 2^whole, put together from its bits, times a polynomial of the rest.
inline Vector power_of_two(Vector x) {
    x = x < -126.0f ? Vector{} - 126.0f : x;
    Integers whole = __builtin_convertvector(x - 0.5f, Integers);  // towards zero: the nearest, since x <= 0
    Vector t = (x - __builtin_convertvector(whole, Vector)) * 0.6931471805599453f;
    Vector p = 1.0f + t * (1.0f + t * (0.5f + t * (1 / 6.f + t * (1 / 24.f + t * (1 / 120.f + t * (1 / 720.f))))));
    return p * (Vector)((whole + 127) << 23);
}

}  // namespace
