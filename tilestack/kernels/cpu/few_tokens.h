// A step of a few tokens, which is as fast as the memory if nothing else is slower:
//
//   layer   norm · qkv │ turn, write and attend, a head of keys for each thread │ output │ norm · gate · up │ down
//                      └ all threads meet where a │ stands, five times a layer
//
// A thread takes a few rows of weights at a time, and each row meets all tokens while it is at hand. Activations are float32
// throughout. Every sum is made in one order, whatever the tokens beside it: a token has the same bits in any batch.

#pragma once

#include <array>
#include <utility>

#include "decoder.h"
#include "team.h"

namespace {

constexpr int64_t FEW = 16;    // tokens that a step may have to be one of few
constexpr int64_t PIECE = 32;  // rows of weights that a thread takes at a time
constexpr int ROWS = 4;        // of these, rows that it computes with at a time
constexpr int TOKENS = 4;      // and the tokens that they meet at a time
constexpr int SUMS = 16;       // vectors of sums that there are registers for, beside what they are made of
constexpr int LINE = 64;       // bytes that come from memory at once
constexpr int AHEAD = 4096;    // bytes that are on their way while one is computed with

// out[r][t]: the products of `rows` rows of weights with `tokens` rows of x.
template <int rows, int tokens, class Number>
inline void dots(const Number* weight, const float* x, int64_t columns, float (*out)[TOKENS]) {
    Vector sums[rows][tokens] = {};
    auto ahead = reinterpret_cast<const char*>(weight) + AHEAD;
    constexpr int step = rows * LANES * sizeof(Number);
    for (int64_t k = 0; k < columns; k += LANES, ahead += step) {
        if (rows > 1)
            for (int line = 0; line < step; line += LINE) __builtin_prefetch(ahead + line);
        Vector w[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) w[r] = load(weight + r * columns + k);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            Vector token = load(x + t * columns + k);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][t] += w[r] * token;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) out[r][t] = sum(sums[r][t]);
}

// The same of codes in groups: `groups` many in a row, those of the first row from `at` on.
template <int rows, int tokens>
inline void grouped_dots(const Matrix& matrix, const Weight* weight, int64_t at, const float* x, int64_t columns,
                         float (*out)[TOKENS]) {
    typedef Group<Weight> Some;
    constexpr int vectors = Some::VECTORS, step = rows * LANES * sizeof(Weight);
    Vector sums[rows][tokens][vectors] = {};
    const int64_t groups = columns / matrix.group;
    auto ahead = reinterpret_cast<const char*>(weight) + AHEAD;
    for (int64_t group = 0; group < groups; group++) {
        auto some = [&]<int... r>(std::integer_sequence<int, r...>) {
            return std::array<Some, rows>{Some(matrix, at + r * groups + group)...};
        }(std::make_integer_sequence<int, rows>());
        for (int64_t k = group * matrix.group; k < (group + 1) * matrix.group; k += vectors * LANES, ahead += step) {
            if (rows > 1)
                for (int line = 0; line < step; line += LINE) __builtin_prefetch(ahead + line);
            Vector w[rows][vectors];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) some[r].read(weight + (r * columns + k) / IN_ONE<Weight>, w[r]);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    Vector token = load(x + t * columns + k + v * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) sums[r][t][v] += w[r][v] * token;
                }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) out[r][t] = sum(vectors > 1 ? sums[r][t][0] + sums[r][t][vectors - 1] : sums[r][t][0]);
}

// out[r][t] of `rows` rows of a matrix, from `row` on, scaled.
template <int rows, int tokens>
inline void scaled_dots(const Matrix& matrix, int64_t row, const float* x, int64_t columns, float (*out)[TOKENS]) {
    const Weight* weight = static_cast<const Weight*>(matrix.rows) + row * columns / IN_ONE<Weight>;
    if constexpr (IS_CODE<Weight>)
        if (std::is_same_v<Weight, Int4> || matrix.group < columns || matrix.zero) {
            if constexpr (rows * tokens * Group<Weight>::VECTORS > SUMS) {
                scaled_dots<rows / 2, tokens>(matrix, row, x, columns, out);
                return scaled_dots<rows / 2, tokens>(matrix, row + rows / 2, x, columns, out + rows / 2);
            } else
                return grouped_dots<rows, tokens>(matrix, weight, row * columns / matrix.group, x, columns, out);
        }
    if constexpr (!std::is_same_v<Weight, Int4>) dots<rows, tokens>(weight, x, columns, out);
    if (matrix.scale)
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tokens; t++) out[r][t] *= matrix.scale[row + r];
}

template <int rows>
inline void dots_of(int tokens, const Matrix& matrix, int64_t row, const float* x, int64_t columns, float (*out)[TOKENS]) {
    switch (tokens) {
        case 1: return scaled_dots<rows, 1>(matrix, row, x, columns, out);
        case 2: return scaled_dots<rows, 2>(matrix, row, x, columns, out);
        case 3: return scaled_dots<rows, 3>(matrix, row, x, columns, out);
        default: return scaled_dots<rows, 4>(matrix, row, x, columns, out);
    }
}

// Rows `first` … of a matrix times every token: emit(row, token, value). Where a single token meets weights of 16 bits or more,
// that is a row at a time: a single stream, which a CPU reads ahead of by itself, and nothing else is slower. Codes
// have to be made numbers, which goes faster with several rows at a time, and more tokens share what is loaded of these. What
// comes next is then asked for in the order in which it lies, which is a single stream again.
template <class Emit>
inline void product(Matrix matrix, int64_t first, int64_t last, const float* x, int64_t tokens, int64_t columns, Emit emit) {
    float out[ROWS][TOKENS];
    for (int64_t row = first; row < last;) {
        int64_t many = (tokens > 1 || IS_CODE<Weight>) && last - row >= ROWS ? ROWS : 1;
        for (int64_t token = 0; token < tokens; token += TOKENS) {
            int some = tokens - token < TOKENS ? tokens - token : TOKENS;
            if (many == ROWS)
                dots_of<ROWS>(some, matrix, row, x + token * columns, columns, out);
            else
                dots_of<1>(some, matrix, row, x + token * columns, columns, out);
            for (int64_t r = 0; r < many; r++)
                for (int t = 0; t < some; t++) emit(row + r, token + t, out[r][t]);
        }
        row += many;
    }
}

void run_few(const Step& step) {
    const int64_t tokens = step.tokens, hidden = step.hidden, middle = step.intermediate, seen = step.heads * step.dim;
    const int64_t width = (step.heads + 2 * step.kv_heads) * step.dim, group = step.heads / step.kv_heads;
    team.run(step.threads, [&](uint32_t thread) {
        float *normal = step.normal + thread * tokens * hidden, *scores = step.scores + thread * step.longest;
        auto normalise = [&](const Plain* weight) {  // every thread for itself, which is sooner than to wait for one
            for (int64_t token = 0; token < tokens; token++)
                rms_norm(step.x + token * hidden, weight, normal + token * hidden, hidden, step.eps);
        };
        auto add = [&](int64_t row, int64_t token, float value) { step.x[token * hidden + row] += value; };
        for (int64_t number = 0; number < step.count; number++) {
            const Layer& layer = step.layers[number];
            normalise(layer.attention_norm);
            team.share(width, PIECE, [&](int64_t first, int64_t last) {
                product(layer.qkv, first, last, normal, tokens, hidden, [&](int64_t row, int64_t token, float value) {
                    step.qkv[token * width + row] = value;
                });
            });
            team.share(step.kv_heads, 1, [&](int64_t kv_head, int64_t) {
                const Kept kept = kept_of(step, number, kv_head);
                for (int64_t token = 0; token < tokens; token++) keep(step, layer, kept, token, kv_head);
                for (int64_t token = 0; token < tokens; token++)
                    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                        turn(step, token, head, layer.q_norm);
                        see(step, kept, token, head, scores, step.seen + token * seen + head * step.dim);
                    }
            });
            team.share(hidden, PIECE, [&](int64_t first, int64_t last) {
                product(layer.output, first, last, step.seen, tokens, seen, add);
            });
            normalise(layer.mlp_norm);
            team.share(middle, PIECE, [&](int64_t first, int64_t last) {
                float* gated = step.gated;
                product(layer.gate_up, first, last, normal, tokens, hidden, [&](int64_t row, int64_t token, float gate) {
                    gated[token * middle + row] = gate / (1 + std::exp(-gate));
                });
                product(
                    layer.gate_up, middle + first, middle + last, normal, tokens, hidden,
                    [&](int64_t row, int64_t token, float up) { gated[token * middle + row - middle] *= up; });
            });
            team.share(hidden, PIECE, [&](int64_t first, int64_t last) {
                product(layer.down, first, last, step.gated, tokens, middle, add);
            });
        }
        normalise(step.norm);
        team.meet();
        if (!thread) memcpy(step.x, normal, tokens * hidden * sizeof(float));
    });
}

void head_of_few(Matrix head, const float* x, float* logits, int64_t tokens, int64_t columns, int64_t count, int64_t threads) {
    team.run(threads, [&](uint32_t) {
        team.share(count, 4 * PIECE, [&](int64_t first, int64_t last) {
            product(head, first, last, x, tokens, columns,
                    [&](int64_t row, int64_t token, float value) { logits[token * count + row] = value; });
        });
    });
}

}  // namespace
