// Drawing tokens by their likelihood, as `ops.sample` does it: the largest of the scaled logits, each with a noise of its own.
//
//   score = (logit - largest) / temperature - log(-log(1 - u)),  u from the seed and the token's number (random.h)
//
// The noise is at most -log(u), which the exponent of u bounds. So logarithms are taken only where the score may be the
// largest yet.

#pragma once

#include <algorithm>
#include <cmath>

#include "random.h"
#include "vectors.h"

namespace {

constexpr float LN_2 = 0.6931472f, ROUNDING = 1e-3f;  // of the bound, whose parts are a few hundred at most where it matters

// `exponential` of ops/sampling.py.
inline float exponential(float u) {
    if (u >= 0.1f) return -std::log(std::max(1 - u, 0x1p-33f));
    return u * (1 + u * (1 / 2.f + u * (1 / 3.f + u * (1 / 4.f + u * (1 / 5.f + u * (1 / 6.f + u * (1 / 7.f)))))));
}

// The largest of n numbers; infinite where one is NaN.
inline float largest(const float* numbers, int64_t n) {
    float most = -INFINITY;
    int64_t k = 0;
    Vector top = Vector{} - INFINITY;
    for (; k + LANES <= n; k += LANES) {
        const Vector some = load(numbers + k), known = some == some ? some : Vector{} + INFINITY;
        top = known > top ? known : top;
    }
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, top[lane]);
    for (; k < n; k++) most = std::max(most, numbers[k] == numbers[k] ? numbers[k] : INFINITY);
    return most;
}

int64_t drawn(const float* logits, int64_t n, int64_t seed, float temperature) {
    const float top = largest(logits, n);
    if (!std::isfinite(top)) return -1;
    if (!(temperature > 0)) return std::find(logits, logits + n, top) - logits;
    float best = -INFINITY;
    int64_t token = 0;
    for (int64_t done = 0; done < n; done += 4 * SLAB) {
        uint32_t words[4 * SLAB];
        float uniform[4 * SLAB], bound[4 * SLAB];
        const int64_t some = std::min(n - done, 4 * SLAB);
        philox(seed, done / 4, std::min(some, SLAB), words);
        for (int64_t i = 0; i < some; i++) {
            uniform[i] = ((float)words[i] + 0.5f) * 0x1p-32f;
            int32_t bits;
            memcpy(&bits, uniform + i, sizeof bits);
            bound[i] = (logits[done + i] - top) / temperature + (float)(127 - (bits >> 23)) * LN_2 + ROUNDING;
        }
        for (int64_t i = 0; i < some; i++) {
            if (bound[i] < best) continue;
            const float score = (logits[done + i] - top) / temperature - std::log(exponential(uniform[i]));
            if (score > best) best = score, token = done + i;
        }
    }
    return token;
}

}  // namespace

// tokens [rows] of logits [rows, n]: -1 where none is likely, and the first of the likeliest where temperature is 0.
extern "C" void draw_tokens(const float* logits, const int64_t* seeds, const float* temperature, int64_t* tokens, int64_t rows,
                            int64_t n) {
    for (int64_t row = 0; row < rows; row++) tokens[row] = drawn(logits + row * n, n, seeds[row], temperature[row]);
}
