// A step of many tokens, such as a prompt: matrix products, on CPUs that have instructions for bfloat16 (panels.h).
//
// A thread turns two panels of weights at a time, which all tokens meet while they are in its cache. Attention is made of the
// same tiles: keys are the rows of a panel, then values its columns, 64 tokens at a time for a block of queries that share
// them, with the likelihoods scaled down as larger scores come up. What meets a matrix is rounded to bfloat16, likelihoods
// too; the residual stream, norms and sums are float32.

#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "few_tokens.h"
#include "panels.h"

#ifdef __AVX512BF16__

namespace {

constexpr bool MANY_TOKENS = std::is_same_v<Plain, BFloat16>;

constexpr int64_t KEYS = 64;     // that a block of queries meets at a time
constexpr int64_t QUERIES = 64;  // of a block: its tokens times the heads that share keys
constexpr int64_t SHORT = 128;   // tokens: with more, to wait for weights is little beside the products, and asking costs more
constexpr int64_t NORMS = 4;     // tokens whose norms a thread makes at a time

// What one thread works in.
struct Room {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::vector<std::unique_ptr<Line[]>> parts;
    Pairs *one, *two;               // panels
    BFloat16 *queries, *likelihood; // [rows, dim], [rows, KEYS]
    float *scores, *seen;           // likewise
    float *most, *total;            // [rows]
    float* scales;                  // of panels, [groups, 2, 16]

    template <class Number>
    void take(Number*& at, int64_t count) {
        parts.emplace_back(new Line[(count * sizeof(Number) + sizeof(Line) - 1) / sizeof(Line)]);
        at = reinterpret_cast<Number*>(parts.back().get());
    }

    Room(int64_t columns, int64_t rows, int64_t dim) {
        const int64_t pairs = (std::max({columns, dim, KEYS}) / 2 + LANES - 1) / LANES * LANES;
        take(one, pairs), take(two, pairs);
        take(queries, rows * dim), take(likelihood, rows * KEYS), take(scores, rows * KEYS), take(seen, rows * dim);
        take(most, rows), take(total, rows);
        take(scales, 2 * columns);  // a group has 16 numbers at least
    }
};

// Rows one … one + 15 and two … two + 15 of a matrix that has `count`, times every token: emit(token, sums, sums).
// The thread's next rows are likely those `further` behind these.
template <class Emit>
void product_of_many(Matrix matrix, int64_t one, int64_t two, int64_t count, int64_t further, int64_t columns,
                     const BFloat16* x, int64_t tokens, Room& room, Emit emit) {
    auto weight = static_cast<const Weight*>(matrix.rows);
    auto row_of = [&](int64_t row) { return std::min(row, count - 1); };  // some may not be there, and nobody looks at theirs
    auto start_of = [&](int64_t row) { return weight + row * columns / IN_ONE<Weight>; };
    const int64_t group = matrix.scale ? matrix.group : columns, groups = columns / group;
    auto turn_panel = [&](Pairs* panel, int64_t first) {
        turn_rows(panel, columns, [&](int r, int64_t k) {
            const int64_t row = row_of(first + r);
            const Weight* at = start_of(row) + k / IN_ONE<Weight>;
            if constexpr (IS_CODE<Weight>) {
                if (!matrix.zero) {
                    constexpr float centre = std::is_same_v<Weight, Int4> ? 8 : 0;
                    return pairs_of_codes(at, columns - k, centre, centre);
                }
                const int8_t* zero = matrix.zero + row * groups;
                return pairs_of_codes(at, columns - k, zero[k / group], zero[std::min(k + LANES, columns - 1) / group]);
            } else
                return pairs_of(at, columns - k);
        });
    };
    turn_panel(room.one, one), turn_panel(room.two, two);
    Scales scales;
    if (matrix.scale) {
        for (int64_t each = 0; each < groups; each++)
            for (int r = 0; r < LANES; r++) {
                room.scales[2 * each * LANES + r] = matrix.scale[row_of(one + r) * groups + each];
                room.scales[(2 * each + 1) * LANES + r] = matrix.scale[row_of(two + r) * groups + each];
            }
        scales = {reinterpret_cast<const Vector(*)[2]>(room.scales), group / 2};
    }
    auto ahead = [&](int64_t row) {
        const bool there = tokens <= SHORT && row + further + LANES <= count;
        return there ? reinterpret_cast<const char*>(start_of(row + further)) : nullptr;
    };
    const int64_t line = IS_CODE<Weight> ? 2 * LANES / IN_ONE<Weight> : sizeof(Pairs);
    tiles(room.one, room.two, columns / 2, x, columns, tokens, {ahead(one), ahead(two), line}, scales, emit);
}

inline Vector silu(Vector x) {
    const Vector less = power_of_two((x < 0 ? x : -x) * (float)LOG2_E);  // e^-|x|
    return x * (x < 0 ? less : Vector{} + 1) / (1 + less);
}

// Tokens of one sequence, one after the other.
struct Block {
    int64_t token, count;
};

std::vector<Block> blocks_of(const Step& step) {
    const int64_t most = std::max<int64_t>(1, QUERIES * step.kv_heads / step.heads);
    std::vector<Block> blocks;
    for (int64_t token = 0; token < step.tokens; token++) {
        const bool goes_on = token && step.sequences[token] == step.sequences[token - 1] &&
                             step.positions[token] == step.positions[token - 1] + 1;
        if (goes_on && blocks.back().count < most)
            blocks.back().count++;
        else
            blocks.push_back({token, 1});
    }
    return blocks;
}

// What the queries of a block, turned, see of a head of keys and values.
void see_together(const Step& step, const Kept& kept, Block block, int64_t kv_head, Room& room, BFloat16* out) {
    const int64_t dim = step.dim, group = step.heads / step.kv_heads, rows = block.count * group;
    const int64_t first_position = step.positions[block.token], length = first_position + block.count;
    const float scale = step.scale * LOG2_E;
    for (int64_t row = 0; row < rows; row++) {
        const float* query = head_of(step, block.token + row / group, kv_head * group + row % group);
        for (int64_t k = 0; k < dim; k += LANES) store(room.queries + row * dim + k, load(query + k));
        room.most[row] = -INFINITY, room.total[row] = 0;
    }
    std::fill_n(room.seen, rows * dim, 0.0f);
    std::vector<int64_t> places((length + KEYS - 1) / KEYS * KEYS);
    each_position(step, block.token, kept.stride, length, [&](int64_t position, int64_t at) { places[position] = at; });
    std::fill(places.begin() + length, places.end(), places[length - 1]);  // nobody sees what is behind it
    for (int64_t first = 0; first < length; first += KEYS) {
        const int64_t* place = places.data() + first;
        for (int64_t key = 0; key < KEYS; key += 2 * LANES) {
            turn_rows(room.one, dim, [&](int r, int64_t k) { return pairs_of(kept.keys + place[key + r] + k, dim - k); });
            turn_rows(room.two, dim, [&](int r, int64_t k) { return pairs_of(kept.keys + place[key + LANES + r] + k, dim - k); });
            tiles(room.one, room.two, dim / 2, room.queries, dim, rows, {}, {}, [&](int64_t row, Vector one, Vector two) {
                store(room.scores + row * KEYS + key, one * scale);
                store(room.scores + row * KEYS + key + LANES, two * scale);
            });
        }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t seen = first_position + row / group - first + 1;  // keys of these, from the first on
            Vector score[KEYS / LANES], top = Vector{} - INFINITY, total = {};
            for (int64_t v = 0; v < KEYS / LANES; v++) {
                const int64_t lanes = std::clamp<int64_t>(seen - v * LANES, 0, LANES);
                const __mmask16 mask = (1u << lanes) - 1;
                const float* at = room.scores + row * KEYS + v * LANES;
                score[v] = (Vector)_mm512_mask_loadu_ps((__m512)(Vector{} - INFINITY), mask, at);
                top = score[v] > top ? score[v] : top;
            }
            const float most = std::max(room.most[row], _mm512_reduce_max_ps((__m512)top));
            const Vector factor = power_of_two(Vector{} + (room.most[row] - most));
            for (int64_t v = 0; v < KEYS / LANES; v++) {
                const Vector likelihood = score[v] == -INFINITY ? Vector{} : power_of_two(score[v] - most);
                store(room.likelihood + row * KEYS + v * LANES, likelihood);
                total += likelihood;
            }
            room.most[row] = most, room.total[row] = room.total[row] * factor[0] + sum(total);
            for (int64_t k = 0; k < dim; k += LANES)
                store(room.seen + row * dim + k, load(room.seen + row * dim + k) * factor);
        }
        for (int64_t k = 0; k < dim; k += 2 * LANES) {
            const int64_t next = k + LANES < dim ? k + LANES : k;
            for (int64_t pair = 0; pair < KEYS / 2; pair++) {
                auto both = [&](int64_t at) {  // 16 numbers of two tokens' values
                    auto words = [&](int64_t key) {
                        return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(kept.values + place[key] + at)));
                    };
                    return _mm512_or_si512(words(2 * pair), _mm512_slli_epi32(words(2 * pair + 1), 16));
                };
                room.one[pair] = both(k), room.two[pair] = both(next);
            }
            tiles(room.one, room.two, KEYS / 2, room.likelihood, KEYS, rows, {}, {}, [&](int64_t row, Vector one, Vector two) {
                float* at = room.seen + row * dim;
                store(at + k, load(at + k) + one);
                if (next > k) store(at + next, load(at + next) + two);
            });
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < dim; k += LANES) {
            BFloat16* at = out + ((block.token + row / group) * step.heads + kv_head * group + row % group) * dim;
            store(at + k, load(room.seen + row * dim + k) / room.total[row]);
        }
}

void run_many(const Step& step) {
    const int64_t tokens = step.tokens, hidden = step.hidden, middle = step.intermediate, seen = step.heads * step.dim;
    const int64_t width = (step.heads + 2 * step.kv_heads) * step.dim, group = step.heads / step.kv_heads;
    const std::vector<Block> blocks = blocks_of(step);
    auto narrow = [](float* at) { return reinterpret_cast<BFloat16*>(at); };  // half of that memory will do
    BFloat16 *normal = narrow(step.normal), *attended = narrow(step.seen), *gated = narrow(step.gated);
    team.run(step.threads, [&](uint32_t thread) {
        Room room(std::max({hidden, middle, seen}), std::max(QUERIES, group), step.dim);
        float *scores = step.scores + thread * step.longest, alone[step.dim];
        auto normalise = [&](const Plain* weight, auto* out) {
            team.share(tokens, NORMS, [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; token++)
                    rms_norm(step.x + token * hidden, weight, out + token * hidden, hidden, step.eps);
            });
        };
        auto multiply = [&](Matrix matrix, int64_t rows, int64_t columns, const BFloat16* x, float* out, bool adds) {
            team.share(rows, 2 * LANES, [&](int64_t one, int64_t) {
                const int64_t two = one + LANES;
                auto emit = [&](int64_t token, Vector first, Vector second) {
                    float* at = out + token * rows;
                    store(at + one, adds ? load(at + one) + first : first);
                    if (two < rows) store(at + two, adds ? load(at + two) + second : second);
                };
                product_of_many(matrix, one, two, rows, step.threads * 2 * LANES, columns, x, tokens, room, emit);
            });
        };
        for (int64_t number = 0; number < step.count; number++) {
            const Layer& layer = step.layers[number];
            normalise(layer.attention_norm, normal);
            multiply(layer.qkv, width, hidden, normal, step.qkv, false);
            team.share(tokens, 1, [&](int64_t token, int64_t) {
                for (int64_t head = 0; head < step.heads; head++) turn(step, token, head, layer.q_norm);
                for (int64_t head = 0; head < step.kv_heads; head++)
                    keep(step, layer, kept_of(step, number, head), token, head);
            });
            team.share(blocks.size() * step.kv_heads, 1, [&](int64_t piece, int64_t) {
                const int64_t kv_head = piece % step.kv_heads;
                const Block block = blocks[piece / step.kv_heads];
                const Kept kept = kept_of(step, number, kv_head);
                if (block.count > 1) return see_together(step, kept, block, kv_head, room, attended);
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    see(step, kept, block.token, head, scores, alone);
                    for (int64_t k = 0; k < step.dim; k += LANES)
                        store(attended + block.token * seen + head * step.dim + k, load(alone + k));
                }
            });
            multiply(layer.output, hidden, seen, attended, step.x, true);
            normalise(layer.mlp_norm, normal);
            team.share(middle, LANES, [&](int64_t one, int64_t) {
                product_of_many(layer.gate_up, one, middle + one, 2 * middle, step.threads * LANES, hidden, normal, tokens, room,
                                [&](int64_t token, Vector gate, Vector up) {
                                    store(gated + token * middle + one, silu(gate) * up);
                                });
            });
            multiply(layer.down, hidden, middle, gated, step.x, true);
        }
        normalise(step.norm, step.x);
    });
}

void head_of_many(Matrix head, const float* x, float* logits, int64_t tokens, int64_t columns, int64_t count, int64_t threads) {
    std::vector<BFloat16> narrow(tokens * columns);
    for (int64_t k = 0; k < tokens * columns; k += LANES) store(narrow.data() + k, load(x + k));
    team.run(threads, [&](uint32_t) {
        Room room(columns, 0, 0);
        team.share(count, 2 * LANES, [&](int64_t one, int64_t) {
            const int64_t two = one + LANES;
            auto lanes = [&](int64_t row) { return (__mmask16)((1u << std::clamp<int64_t>(count - row, 0, LANES)) - 1); };
            auto emit = [&](int64_t token, Vector first, Vector second) {
                _mm512_mask_storeu_ps(logits + token * count + one, lanes(one), (__m512)first);
                _mm512_mask_storeu_ps(logits + token * count + two, lanes(two), (__m512)second);
            };
            product_of_many(head, one, two, count, threads * 2 * LANES, columns, narrow.data(), tokens, room, emit);
        });
    });
}

}  // namespace

#else

namespace {

constexpr bool MANY_TOKENS = false;
constexpr auto run_many = run_few;
constexpr auto head_of_many = head_of_few;

}  // namespace

#endif
