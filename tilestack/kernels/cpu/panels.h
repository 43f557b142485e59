// Products of bfloat16, by instructions that add products of pairs to float32.
//
//   panel   16 rows of a matrix, turned so that a register holds a pair of columns of each: [columns / 2][16 rows][2]
//   tile    8 tokens × 2 panels of sums in registers; for a pair of columns, 2 panels are read and 8 pairs spread out

#pragma once

#include <type_traits>

#include "codes.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t TILE = 8;  // tokens

typedef __m512i Pairs;  // of bfloat16, 16 of them

inline void store(BFloat16* at, Vector values) {
    _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh((__m512)values));
}

inline Vector add_products(Vector sums, Pairs one, Pairs other) {
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)one, (__m512bh)other);
}

// Up to 32 numbers of a row, of which there are a multiple of 16; zeros behind them.
inline Pairs pairs_of(const BFloat16* at, int64_t count) {
    return _mm512_maskz_loadu_epi16(count < 2 * LANES ? 0xffff : 0xffffffff, at);
}
inline Pairs pairs_of(Vector first, Vector second) { return (Pairs)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
template <class Number>
inline Pairs pairs_of(const Number* at, int64_t count) {
    return pairs_of(load(at), count < 2 * LANES ? Vector{} : load(at + LANES));
}

// The same of codes, as code - zero, which bfloat16 has exactly. `zero` and `next` are of the first and the second 16.
template <class Code>
inline Pairs pairs_of_codes(const Code* at, int64_t count, float zero, float next) {
    return pairs_of(load(at) - zero, count < 2 * LANES ? Vector{} : load(at + LANES) - next);
}
inline Pairs pairs_of_codes(const Int4* at, int64_t, float zero, float next) {
    const Words both = widened(at);
    auto number = [](Words code) { return (Vector)_mm512_cvtepi32_ps((__m512i)code); };
    return pairs_of(number(both & 15) - zero, number(both >> 4) - next);
}

// 16 rows of 16 words become its columns.
inline void transpose(const Pairs (&rows)[LANES], Pairs* columns) {
    Pairs two[LANES], four[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        two[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        two[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {  // then four[i + j] has column j of every quarter, of rows i … i + 3
        four[i] = _mm512_unpacklo_epi64(two[i], two[i + 2]);
        four[i + 1] = _mm512_unpackhi_epi64(two[i], two[i + 2]);
        four[i + 2] = _mm512_unpacklo_epi64(two[i + 1], two[i + 3]);
        four[i + 3] = _mm512_unpackhi_epi64(two[i + 1], two[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const Pairs even = _mm512_shuffle_i32x4(four[j], four[4 + j], 0x88);
        const Pairs odd = _mm512_shuffle_i32x4(four[j], four[4 + j], 0xdd);
        const Pairs more_even = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0x88);
        const Pairs more_odd = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0xdd);
        columns[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
        columns[4 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
        columns[8 + j] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
        columns[12 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
    }
}

// The panel of 16 rows, of whose row r pairs(r, k) are 32 numbers from column k on.
template <class Read>
inline void turn_rows(Pairs* panel, int64_t columns, Read pairs) {
    for (int64_t k = 0; k < columns; k += 2 * LANES) {
        Pairs rows[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) rows[r] = pairs(r, k);
        transpose(rows, panel + k / 2);
    }
}

// What the sums of each `span` pairs of columns are multiplied with before they are added up, rows of panel one and panel two
// for each span; null: with nothing, and all pairs are one span.
struct Scales {
    const Vector (*of)[2] = nullptr;
    int64_t span = 0;
};

// The rows that the next panels are made of, which are on their way while these are computed with; null: unknown. `line` is
// how many bytes of them come with each pair of columns.
struct Ahead {
    const char *one = nullptr, *two = nullptr;
    int64_t line = sizeof(Pairs);
};

// emit(token, sums of panel one, sums of panel two) for tokens x, `stride` numbers apart. Meanwhile the memory is asked for
// what is behind `ahead`, `line` bytes with each pair.
template <int tokens, class Emit>
inline void tile(const Pairs* one, const Pairs* two, int64_t pairs, const BFloat16* x, int64_t stride, const char* ahead,
                 int64_t line, Scales scales, Emit emit) {
    Vector totals[tokens][2] = {};
    if (!ahead) ahead = reinterpret_cast<const char*>(one), line = 0;  // which is at hand, so that one loop does for both
    const int64_t span = scales.of ? scales.span : pairs;
    for (int64_t begin = 0; begin < pairs; begin += span) {
        Vector sums[tokens][2] = {};
        for (int64_t pair = begin; pair < begin + span; pair++) {
            __builtin_prefetch(ahead + pair * line, 0, 2);
            const Pairs first = one[pair], second = two[pair];
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++) {
                int32_t both;
                memcpy(&both, x + t * stride + 2 * pair, sizeof both);
                const Pairs spread = _mm512_set1_epi32(both);
                sums[t][0] = add_products(sums[t][0], first, spread);
                sums[t][1] = add_products(sums[t][1], second, spread);
            }
        }
        const Vector* scale = scales.of ? scales.of[begin / span] : nullptr;
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
            for (int panel = 0; panel < 2; panel++)
                totals[t][panel] = scale ? totals[t][panel] + sums[t][panel] * scale[panel] : sums[t][panel];
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) emit(t, totals[t][0], totals[t][1]);
}

template <class Emit>
inline void tiles(const Pairs* one, const Pairs* two, int64_t pairs, const BFloat16* x, int64_t stride, int64_t tokens,
                  Ahead ahead, Scales scales, Emit emit) {
    int64_t token = 0;
    auto some = [&](auto size) {
        for (; token + size <= tokens; token += size) {
            const int64_t left = tokens - token;  // to the last of them, lest their numbers drive out what came for the next
            tile<size>(one, two, pairs, x + token * stride, stride,
                       left > 2 * TILE ? nullptr : left > TILE ? ahead.one : ahead.two, ahead.line, scales,
                       [&](int t, Vector first, Vector second) { emit(token + t, first, second); });
        }
    };
    some(std::integral_constant<int, TILE>());
    some(std::integral_constant<int, TILE / 2>());
    some(std::integral_constant<int, TILE / 4>());
    some(std::integral_constant<int, 1>());
}

}  // namespace

#endif
