// Weights as codes of 8 or 4 bits, and the numbers that they stand for:
//
//   number = (code - zero) · scale        `group` neighbours of a row share scale and zero point
//
// A zero point is subtracted exactly, and the product is rounded once to float32, as `ops.linear_weight_only` defines it. So
// the numbers here are the definition's, bit for bit, and what differs is in which order products are added.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// Two codes of 4 bits. Of 32 codes, the first 16 are the low halves of 16 bytes and the others their high halves.
struct Int4 {
    uint8_t bits;
};

struct Float8 {  // float8_e4m3fn
    uint8_t bits;
};

struct Matrix {
    const void* rows;
    const float* scale;  // [rows, groups]; null: of numbers
    const int8_t* zero;  // likewise; null: 8 of 4 bits, otherwise 0
    int64_t group;       // a multiple of 16, of 4 bits of 32
};

template <class Weight>
constexpr int IN_ONE = std::is_same_v<Weight, Int4> ? 2 : 1;  // numbers in what a pointer points to

template <class Weight>
constexpr bool IS_CODE = sizeof(Weight) == 1;

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t MoreHalves __attribute__((vector_size(32)));

#ifdef __AVX512F__
inline Words widened(const void* at) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
inline Vector looked_up(Vector table, Words at) {  // by the lowest 4 bits
    return (Vector)_mm512_permutexvar_ps((__m512i)at, (__m512)table);
}
#else
inline Words widened(const void* at) {
    auto halves = __builtin_convertvector(*reinterpret_cast<const Bytes*>(at), MoreHalves);
    return __builtin_convertvector(halves, Words);
}
inline Vector looked_up(Vector table, Words at) { return __builtin_shuffle(table, (Integers)(at & 15)); }
#endif

// A code of fp8 has 4 bits of exponent and 3 of fraction, which are the upper ones of float32, for an exponent that is 120
// less. Subnormal ones are so too: what float32 has for them is subnormal, and a power of two makes it normal.
inline Vector load(const Float8* at) {
    const Words code = widened(at), size = code & 0x7f;
    const Vector number = (Vector)((code & 0x80) << 24 | size << 20) * 0x1p120f;
    return size == 0x7f ? Vector{} + NAN : number;
}

// What the codes of a group stand for, 16 `VECTORS` numbers at a time.
template <class Code>
struct Group {
    static constexpr int VECTORS = 1;
    float scale, zero;

    Group(const Matrix& matrix, int64_t at) : scale(matrix.scale[at]), zero(matrix.zero ? matrix.zero[at] : 0) {}
    void read(const Code* at, Vector* numbers) const { numbers[0] = (load(at) - zero) * scale; }
};

template <>
struct Group<Int4> {
    static constexpr int VECTORS = 2;
    Vector numbers_of;  // the 16 codes

    Group(const Matrix& matrix, int64_t at) {
        const Vector codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const float zero = matrix.zero ? matrix.zero[at] : 8;
        numbers_of = (codes - zero) * matrix.scale[at];
    }
    void read(const Int4* at, Vector* numbers) const {
        const Words both = widened(at);
        numbers[0] = looked_up(numbers_of, both), numbers[1] = looked_up(numbers_of, both >> 4);
    }
};

}  // namespace
