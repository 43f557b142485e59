// A decoder as its step reads it, and what a step of any length does to single tokens: norms, rotation, one query's attention.

#pragma once

#include "codes.h"

namespace {

typedef PLAIN Plain;    // float or BFloat16: what norms have and what keys and values are kept in
typedef WEIGHT Weight;  // that, or int8_t, Float8 or Int4: what matrices have

struct Layer {
    Matrix qkv, output, gate_up, down;
    const Plain *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
};

struct Step {
    // what the model is
    const Layer* layers;
    const Plain* norm;
    int64_t count, hidden, heads, kv_heads, dim, intermediate;
    double eps, scale;  // scale: of the scores
    // where it remembers
    void *keys, *values;  // [layers, pages, page, kv_heads, dim]
    int64_t pages, page;
    const float *cos, *sin;  // [positions, dim / 2]
    // the tokens
    int64_t tokens, blocks;
    const int64_t *positions, *slots, *sequences;  // [tokens]; a slot below 0: of padding
    const int64_t* tables;                         // [sequences, blocks]
    // memory to work in; of many tokens `seen`, `gated` and `normal` (one for all threads) are bfloat16
    float* x;       // [tokens, hidden]: in, the embeddings; out, the normed hidden states
    float* qkv;     // [tokens, (heads + 2 kv_heads) dim]
    float* seen;    // [tokens, heads · dim]
    float* gated;   // [tokens, intermediate]
    float* normal;  // [threads, tokens, hidden]
    float* scores;  // [threads, longest], longest a multiple of 16
    int64_t longest, threads;
};

template <class Out>
void rms_norm(const float* x, const Plain* weight, Out* out, int64_t size, double eps) {
    Vector squares = {};
    for (int64_t k = 0; k < size; k += LANES) squares += load(x + k) * load(x + k);
    float factor = 1 / std::sqrt(sum(squares) / size + (float)eps);
    for (int64_t k = 0; k < size; k += LANES)
        store(out + k, load(x + k) * factor * load(weight + k));
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t k = 0; k < half; k++) {
        float first = head[k], second = head[k + half];
        head[k] = first * cos[k] - second * sin[k];
        head[k + half] = second * cos[k] + first * sin[k];
    }
}

// The keys and values of one head in one layer.
struct Kept {
    Plain *keys, *values;
    int64_t stride;  // numbers from a token's to the next one's
};

inline Kept kept_of(const Step& step, int64_t layer, int64_t kv_head) {
    const int64_t stride = step.kv_heads * step.dim, offset = layer * step.pages * step.page * stride + kv_head * step.dim;
    return {static_cast<Plain*>(step.keys) + offset, static_cast<Plain*>(step.values) + offset, stride};
}

// visit(position, offset), for positions [0, length) that a token sees: where their keys and values lie.
template <class Visit>
inline void each_position(const Step& step, int64_t token, int64_t stride, int64_t length, Visit visit) {
    const int64_t* pages = step.tables + step.sequences[token] * step.blocks;
    for (int64_t first = 0; first < length; first += step.page) {
        int64_t offset = *pages++ * step.page * stride;
        const int64_t last = first + step.page < length ? first + step.page : length;
        for (int64_t position = first; position < last; position++, offset += stride) visit(position, offset);
    }
}

inline float* head_of(const Step& step, int64_t token, int64_t head) {  // of the queries, then the keys, then the values
    return step.qkv + (token * (step.heads + 2 * step.kv_heads) + head) * step.dim;
}

// A head of a token, normed where the model does so, and turned by the token's position.
void turn(const Step& step, int64_t token, int64_t head, const Plain* norm) {
    const int64_t half = step.dim / 2, at = step.positions[token] * half;
    float* numbers = head_of(step, token, head);
    if (norm) rms_norm(numbers, norm, numbers, step.dim, step.eps);
    rotate(numbers, step.cos + at, step.sin + at, half);
}

// Turns what a token adds to a head of keys and values, and keeps it; of padding nothing is kept.
void keep(const Step& step, const Layer& layer, const Kept& kept, int64_t token, int64_t kv_head) {
    if (step.slots[token] < 0) return;
    turn(step, token, step.heads + kv_head, layer.k_norm);
    const float *key = head_of(step, token, step.heads + kv_head), *value = key + step.kv_heads * step.dim;
    const int64_t at = step.slots[token] * kept.stride;
    for (int64_t k = 0; k < step.dim; k++) {
        store(kept.keys + at + k, key[k]);
        store(kept.values + at + k, value[k]);
    }
}

// What one query, turned, sees of the tokens up to its own: out [dim]. `scores` has room for them, a multiple of 16.
void see(const Step& step, const Kept& kept, int64_t token, int64_t head, float* scores, float* out) {
    const int64_t dim = step.dim, length = step.positions[token] + 1;
    const float *query = head_of(step, token, head), scale = step.scale;
    float most = -INFINITY;
    each_position(step, token, kept.stride, length, [&](int64_t position, int64_t offset) {
        Vector products = {};
        for (int64_t k = 0; k < dim; k += LANES) products += load(query + k) * load(kept.keys + offset + k);
        scores[position] = sum(products) * scale;
        most = scores[position] > most ? scores[position] : most;
    });
    for (int64_t position = length; position % LANES; position++) scores[position] = -INFINITY;
    Vector totals = {};
    for (int64_t position = 0; position < length; position += LANES) {
        Vector likelihood = power_of_two((load(scores + position) - most) * (float)LOG2_E);
        for (int lane = 0; lane < LANES; lane++)
            if (position + lane >= length) likelihood[lane] = 0;
        store(scores + position, likelihood);
        totals += likelihood;
    }
    const float share = 1 / sum(totals);
    for (int64_t k = 0; k < dim; k += LANES) {
        Vector seen = {};
        each_position(step, token, kept.stride, length, [&](int64_t position, int64_t offset) {
            seen += scores[position] * load(kept.values + offset + k);
        });
        store(out + k, seen * share);
    }
}

}  // namespace
