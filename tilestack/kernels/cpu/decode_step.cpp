// A decode step of a dense decoder on a CPU: a few tokens through all layers, in one call.
//
// Decoding reads every weight for a handful of tokens, so the step is as fast as the memory if nothing else is slower:
//
//   layer   norm · qkv │ turn, write and attend, a head of keys for each thread │ output │ norm · gate · up │ down
//                      └ all threads meet where a │ stands, five times a layer (Team)
//
// Weights are rows of float32, bfloat16 or int8 with a scale for each row. A thread takes a few rows at a time, and each
// row meets all tokens while it is at hand. Activations are float32 throughout. Every sum is made in one order, whatever the
// tokens beside it: a token has the same bits in any batch.
//
// Vectors are the compiler's own, so the source is for any CPU; what is 16 numbers here is two registers with AVX2.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <unistd.h>

#include <functional>
#include <mutex>
#include <thread>

namespace {

constexpr int LANES = 16;  // numbers in a vector: rows of weights and heads are multiples of it
constexpr int ROWS = 4;    // rows of weights that a thread computes at a time
constexpr int SPINS = 2048;  // tries before a thread that waits for others falls asleep
constexpr int MOST_THREADS = 256;
constexpr int AHEAD = 8;   // rows that are on their way while one is computed with
constexpr int TOKENS = 4;  // and the tokens that they meet at a time

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
typedef PLAIN Plain;    // float or BFloat16: what norms have and what keys and values are kept in
typedef WEIGHT Weight;  // that, or int8_t: what matrices have

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

struct Matrix {
    const void* rows;
    const float* scale;  // of each row; null: 1
};

struct Layer {
    Matrix qkv, output, gate_up, down;
    const Plain *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
};

}  // namespace

extern "C" struct Step {
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
    const int64_t *positions, *slots, *sequences;  // [tokens]
    const int64_t* tables;                         // [sequences, blocks]
    // memory to work in
    float* x;       // [tokens, hidden]: in, the embeddings; out, the normed hidden states
    float* qkv;     // [tokens, (heads + 2 kv_heads) dim]
    float* seen;    // [tokens, heads · dim]
    float* gated;   // [tokens, intermediate]
    float* normal;  // [threads, tokens, hidden]
    float* scores;  // [threads, longest], longest a multiple of 16
    int64_t longest, threads;
};

namespace {

// out[r][t]: the products of `rows` rows of weights with `tokens` rows of x.
template <int rows, int tokens>
inline void dots(const Weight* weight, const float* x, int64_t columns, float (*out)[TOKENS]) {
    Vector sums[rows][tokens] = {};
    for (int64_t k = 0; k < columns; k += LANES) {
        Vector w[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            w[r] = load(weight + r * columns + k);
            __builtin_prefetch(weight + (r + AHEAD) * columns + k);
        }
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

template <int rows>
inline void dots_of(int tokens, const Weight* weight, const float* x, int64_t columns, float (*out)[TOKENS]) {
    switch (tokens) {
        case 1: return dots<rows, 1>(weight, x, columns, out);
        case 2: return dots<rows, 2>(weight, x, columns, out);
        case 3: return dots<rows, 3>(weight, x, columns, out);
        default: return dots<rows, 4>(weight, x, columns, out);
    }
}

// Rows `first` … of a matrix times every token: emit(row, token, value).
template <class Emit>
inline void product(Matrix matrix, int64_t first, int64_t last, const float* x, int64_t tokens, int64_t columns, Emit emit) {
    auto weight = static_cast<const Weight*>(matrix.rows);
    float out[ROWS][TOKENS];
    for (int64_t row = first; row < last;) {
        int64_t many = last - row >= ROWS ? ROWS : 1;
        for (int64_t token = 0; token < tokens; token += TOKENS) {
            int some = tokens - token < TOKENS ? tokens - token : TOKENS;
            if (many == ROWS)
                dots_of<ROWS>(some, weight + row * columns, x + token * columns, columns, out);
            else
                dots_of<1>(some, weight + row * columns, x + token * columns, columns, out);
            for (int64_t r = 0; r < many; r++)
                for (int t = 0; t < some; t++)
                    emit(row + r, token + t, matrix.scale ? out[r][t] * matrix.scale[row + r] : out[r][t]);
        }
        row += many;
    }
}

void rms_norm(const float* x, const Plain* weight, float* out, int64_t size, double eps) {
    Vector squares = {};
    for (int64_t k = 0; k < size; k += LANES) squares += load(x + k) * load(x + k);
    float factor = 1 / std::sqrt(sum(squares) / size + (float)eps);
    for (int64_t k = 0; k < size; k += LANES)
        *reinterpret_cast<Floats*>(out + k) = load(x + k) * factor * load(weight + k);
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t k = 0; k < half; k++) {
        float first = head[k], second = head[k + half];
        head[k] = first * cos[k] - second * sin[k];
        head[k + half] = second * cos[k] + first * sin[k];
    }
}

// One head of keys: what the new tokens add to it is written, and the queries that share it see what is there.
void attend(const Step& step, const Layer& layer, int64_t number, int64_t kv_head, float* scores) {
    const int64_t dim = step.dim, half = dim / 2, group = step.heads / step.kv_heads;
    const int64_t width = (step.heads + 2 * step.kv_heads) * dim, stride = step.kv_heads * dim;
    const int64_t offset = number * step.pages * step.page * stride + kv_head * dim;
    auto keys = static_cast<Plain*>(step.keys) + offset, values = static_cast<Plain*>(step.values) + offset;
    for (int64_t token = 0; token < step.tokens; token++) {
        float* key = step.qkv + token * width + (step.heads + kv_head) * dim;
        const float *value = key + step.kv_heads * dim, *cos = step.cos + step.positions[token] * half,
                    *sin = step.sin + step.positions[token] * half;
        if (layer.k_norm) rms_norm(key, layer.k_norm, key, dim, step.eps);
        rotate(key, cos, sin, half);
        for (int64_t k = 0; k < dim; k++) {
            store(keys + step.slots[token] * stride + k, key[k]);
            store(values + step.slots[token] * stride + k, value[k]);
        }
    }
    for (int64_t token = 0; token < step.tokens; token++) {
        const int64_t length = step.positions[token] + 1;
        const int64_t* table = step.tables + step.sequences[token] * step.blocks;
        auto place = [&](int64_t position) {
            return (table[position / step.page] * step.page + position % step.page) * stride;
        };
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            float *query = step.qkv + token * width + head * dim, *out = step.seen + (token * step.heads + head) * dim;
            if (layer.q_norm) rms_norm(query, layer.q_norm, query, dim, step.eps);
            rotate(query, step.cos + step.positions[token] * half, step.sin + step.positions[token] * half, half);
            float most = -INFINITY;
            for (int64_t position = 0; position < length; position++) {
                const Plain* key = keys + place(position);
                Vector products = {};
                for (int64_t k = 0; k < dim; k += LANES) products += load(query + k) * load(key + k);
                scores[position] = sum(products) * (float)(step.scale * 1.4426950408889634);  // for powers of two
                most = scores[position] > most ? scores[position] : most;
            }
            for (int64_t position = length; position % LANES; position++) scores[position] = -INFINITY;
            Vector totals = {};
            for (int64_t position = 0; position < length; position += LANES) {
                Vector likelihood = power_of_two(load(scores + position) - most);
                for (int lane = 0; lane < LANES; lane++)
                    if (position + lane >= length) likelihood[lane] = 0;
                *reinterpret_cast<Floats*>(scores + position) = likelihood;
                totals += likelihood;
            }
            const float share = 1 / sum(totals);
            for (int64_t k = 0; k < dim; k += LANES) {
                Vector seen = {};
                for (int64_t position = 0; position < length; position++)
                    seen += scores[position] * load(values + place(position) + k);
                *reinterpret_cast<Floats*>(out + k) = seen * share;
            }
        }
    }
}

// The threads of all steps. Those of OpenMP spin for milliseconds while they wait, which is lost where other processes want
// the CPU too, and most where it was one of these threads that had to give way; ours fall asleep soon.
class Team {
    std::atomic<int64_t> next{0};  // the piece of work that nobody has taken yet
    std::atomic<uint32_t> calls{1};  // how many there were, times 256, and how many threads are in the last one
    std::atomic<uint32_t> arrived{0}, meetings{0};
    uint32_t started = 1;  // threads that there are, the caller among them
    pid_t process = 0;
    const std::function<void(uint32_t)>* job = nullptr;
    std::mutex busy;

    static void wait_while(std::atomic<uint32_t>& number, uint32_t is) {
        for (int spins = 0; spins < SPINS; spins++)
            if (number.load() != is) return;
        number.wait(is);  // asleep
    }

    void work(uint32_t thread, uint32_t seen) {
        for (;;) {
            wait_while(calls, seen);
            seen = calls.load();
            if (thread >= seen % MOST_THREADS) continue;
            (*job)(thread);
            meet();
        }
    }

   public:
    // Calls todo(thread) in so many threads, and returns when all are through.
    void run(int64_t wanted, const std::function<void(uint32_t)>& todo) {
        std::lock_guard<std::mutex> alone(busy);
        const uint32_t threads = wanted < MOST_THREADS ? wanted : MOST_THREADS - 1;
        if (process != getpid()) started = 1, process = getpid();  // a fork has none of its parent's threads
        for (; started < threads; started++) std::thread(&Team::work, this, started, calls.load()).detach();
        job = &todo;
        calls.store((calls.load() / MOST_THREADS + 1) * MOST_THREADS + threads);
        calls.notify_all();
        todo(0);
        meet();
    }

    // All threads are here before one goes on.
    void meet() {
        const uint32_t now = meetings.load();
        if (arrived.fetch_add(1) + 1 < calls.load() % MOST_THREADS) return wait_while(meetings, now);
        arrived.store(0);
        next.store(0);
        meetings.store(now + 1);
        meetings.notify_all();
    }

    // Calls body(first, last) for pieces of [0, count), each by the thread that comes first; then all meet.
    template <class Body>
    void share(int64_t count, int64_t piece, Body body) {
        for (int64_t first; (first = next.fetch_add(1) * piece) < count;)
            body(first, first + piece < count ? first + piece : count);
        meet();
    }
};

Team& team = *new Team;  // never destroyed: its threads live as long as the process

constexpr int64_t PIECE = 32;  // rows of weights that a thread takes at a time


void run(const Step& step) {
    const int64_t tokens = step.tokens, hidden = step.hidden, middle = step.intermediate, seen = step.heads * step.dim;
    const int64_t width = (step.heads + 2 * step.kv_heads) * step.dim;
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
            team.share(step.kv_heads, 1, [&](int64_t head, int64_t) { attend(step, layer, number, head, scores); });
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

}  // namespace

extern "C" void decode_step(const Step* step) { run(*step); }

extern "C" void decode_head(const void* rows, const float* scale, const float* x, float* logits, int64_t tokens,
                            int64_t columns, int64_t count, int64_t threads) {
    const Matrix matrix{rows, scale};
    team.run(threads, [&](uint32_t) {
        team.share(count, 4 * PIECE, [&](int64_t first, int64_t last) {
            product(matrix, first, last, x, tokens, columns,
                    [&](int64_t row, int64_t token, float value) { logits[token * count + row] = value; });
        });
    });
}
