// One token of one sequence through a whole decoder, in one launch: ids and pages in, logits out.
//
// A dense decoder of the Llama kind at batch 1 reads every weight once and does next to nothing with it, so all that counts
// is that the memory never waits. BLOCKS blocks, one to a multiprocessor, stay for the whole step. Each streams the weights
// that are its own through a ring in shared memory, RING chunks ahead of what it computes with, whatever phase or layer that
// is: while blocks wait for each other, the weights keep coming.
//
//     chunk    32 bytes a thread, by cp.async. A thread reads only what it brought itself, so the ring needs no barrier.
//     product  A warp brings 8 rows by 32 columns, twice: 16 bytes of a row to each of four threads, which tensor cores
//              take for pieces of two rows of a 16 x 16 matrix (see Columns). The other matrix has columns for x rounded
//              to bfloat16, and for what rounding took away, so that products are as good as with float.
//     held     What waits for others has a product's first chunks in registers already, ready to be multiplied.
//
// With CODES, the weights of layers are codes of float8_e4m3fn, each row with a scale: 16 bytes a thread are 8 rows by 64
// columns, and a chunk; two matrices are made of them on their way to the tensor cores (see Chunk). The head stays bfloat16.
//
// Blocks wait for each other as seldom as can be. A cluster of CLUSTER blocks, which can write into each other's shared memory,
// owns some heads and some of the feed-forward's units from beginning to end; only what is added to the residual stream is
// everyone's:
//
//     x, norm → qkv of the cluster's heads  ─cluster─▶ attention, a piece of the text to a block ─cluster─▶ merge,
//     output projection of these heads, a part of every element  ═grid═▶  x += parts, norm  ─cluster─▶
//     gate and up of the cluster's units  ─cluster─▶  down projection of these units, a part of every element  ═grid═▶ …
//
// What goes through a cluster is sent: each number counts, where it arrives, towards a barrier of the block that waits for it.
// (A barrier of the cluster would have every thread wait for the weights that it has on their way.) What goes to other
// clusters lies in global memory, each number beside a mark that says of which layer of which step it is, in one word: who
// needs it looks until it is there, and no barrier is behind it. A block keeps 1 / CLUSTER of x, in every cluster the same, and
// so looks at as much of the parts alone; there are two sets of parts, of attention and of feed-forward, and nobody writes into
// one before all that was in it has been seen: what is written follows from it, through the other.
//
// Parts are added in one order, so that results have the same bits in every run. The columns of a product are divided over the
// warps and their sums added up; a norm's factor is multiplied in after.
//
// Shapes, as macros: LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, QK_NORM, CODES, CLUSTER, CLUSTERS.
#include <cooperative_groups.h>

#include "ptx.cuh"

namespace cg = cooperative_groups;
using bf16 = __nv_bfloat16;

constexpr int THREADS = 512, WARPS = THREADS / 32, BLOCKS = CLUSTER * CLUSTERS;
constexpr int QUERIES = HEADS / CLUSTERS;          // heads of a cluster
constexpr int SHARE = HEADS / KV_HEADS;            // heads that share keys and values
constexpr int KEYS = QUERIES > SHARE ? QUERIES / SHARE : 1;  // heads of keys of a cluster; several clusters may have the same
constexpr int PER_KEY = QUERIES / KEYS;
constexpr int UNITS = INTERMEDIATE / CLUSTERS, MY_UNITS = UNITS / CLUSTER;
constexpr int SEEN = QUERIES * HEAD_DIM;           // elements that a cluster's attention gives
constexpr int AHEAD = KEYS > 1 ? 0 : 2;            // rounds of keys that are brought before the queries are there
static_assert(HEADS % CLUSTERS == 0 && (QUERIES % SHARE == 0 || SHARE % QUERIES == 0), "heads over clusters");
static_assert(INTERMEDIATE % (CLUSTERS * CLUSTER) == 0 && HIDDEN % 256 == 0 && HIDDEN <= 2048, "sizes over blocks");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "sizes of heads");

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }
constexpr int largest_power_of_two(int divides, int at_most) {
  return divides % at_most == 0 ? at_most : largest_power_of_two(divides, at_most / 2);
}

#if CODES
using Weight = uint8_t;
#else
using Weight = bf16;
#endif
constexpr int HALVES = CODES ? 1 : 2;  // of a chunk: 16 bytes of a row, and of the one that is 8 below
constexpr int TALL = 8 * HALVES;

// ROWS rows of COLUMNS weights: SPLIT warps share TALL rows, WIDE columns of them in each of PIECES, and a warp has TURNS of
// those. What sums up to a row are PARTS numbers, which LANES threads add, of SUMMED rows at a time.
template <typename W, int ROWS_, int COLUMNS, int SUMMED = ROWS_> struct Product {
  static constexpr bool CODED = sizeof(W) == 1;
  static constexpr int WIDE = 64 / sizeof(W), ALONG = WIDE / 32;  // matrices in 16 bytes a thread
  static constexpr int ROWS = ROWS_, SUMS = SUMMED, PATCHES = COLUMNS / WIDE;
  static constexpr int SPLIT = largest_power_of_two(PATCHES, WARPS);
  static constexpr int PIECES = PATCHES / SPLIT, TURNS = ROWS * SPLIT / (TALL * WARPS), CHUNKS = TURNS * PIECES;
  static constexpr int PARTS = 2 * SPLIT;
  static constexpr int LANES = PARTS * SUMMED <= THREADS ? PARTS : floor_power_of_two(THREADS / SUMMED);
  static constexpr int APART = ROWS + 32 / LANES;  // elements from one part to the next, in other banks
  static_assert(COLUMNS % WIDE == 0 && ROWS * SPLIT % (TALL * WARPS) == 0, "rows and columns over warps");

  // Where element e of the other factor lies in shared memory. Of codes, an even and an odd one are expanded to different
  // matrices, so pairs of neighbours are parted: 0 2 1 3; and the threads of a warp find theirs in different banks.
  __device__ __forceinline__ static int place_of(int e) {
    return CODED ? (e & ~3 | (e & 1) << 1 | (e >> 1 & 1)) ^ (e >> 3 & 4) : e;
  }
};
using Qkv = Product<Weight, (QUERIES + 2 * KEYS) * HEAD_DIM / CLUSTER, HIDDEN>;
using Output = Product<Weight, HIDDEN / CLUSTER, SEEN>;
using GateUp = Product<Weight, 2 * MY_UNITS, HIDDEN, MY_UNITS>;
using Down = Product<Weight, HIDDEN / CLUSTER, UNITS>;
using Head = Product<bf16, 64, HIDDEN>;  // as often as there are rows
constexpr bool ONE_HEAD = HEAD_DIM % Qkv::ROWS == 0;  // of queries, keys or values, whose rows a block has
constexpr int OUTPUT_AT = Qkv::CHUNKS, GATE_UP_AT = OUTPUT_AT + Output::CHUNKS, DOWN_AT = GATE_UP_AT + GateUp::CHUNKS;
constexpr int LAYER_CHUNKS = DOWN_AT + Down::CHUNKS;
constexpr int HEAD_TURNS = (VOCABULARY + BLOCKS * Head::ROWS - 1) / (BLOCKS * Head::ROWS);

struct Layer {
  const Weight *qkv, *output, *gate_up, *down;
  const bf16 *attention_norm, *mlp_norm, *q_norm, *k_norm;
#if CODES
  const float *qkv_scale, *output_scale, *gate_up_scale, *down_scale;  // of each row
#endif
};
struct Step {
  const Layer* layers;
  const bf16 *embedding, *head, *norm;
  const float *cos, *sin;                // [positions, HEAD_DIM / 2]
  const int64_t *ids, *length, *pages;   // [1], [1] with the new token, [blocks]
  bf16 *keys, *values;                   // [LAYERS, pool, page, KV_HEADS, HEAD_DIM]
  uint64_t* parts;                       // [2, CLUSTERS, HIDDEN], marked
  float* logits;                         // [VOCABULARY]
  unsigned* marked;                      // the last mark of the step before
  int64_t pool;                          // pages there are
  int page;                              // tokens in one
  float eps, scale;
};

// What a block gets from its cluster, once a layer each.
struct Received {
  float qkv[(QUERIES + 2 * KEYS) * HEAD_DIM];
  struct alignas(16) { float seen[SEEN], largest[QUERIES], sums[QUERIES]; } of_block[CLUSTER];  // of each block's piece of the text
  float units[UNITS];
};

struct Shared {
  alignas(16) float x[HIDDEN];                  // the residual stream times a norm's weights, as Product::place_of has it
  alignas(16) Received received;
  union {  // of a product's sums, or of what is seen of a warp's keys; each is done with before the next begins
    float qkv[Qkv::PARTS][Qkv::APART], seen[WARPS][SEEN], output[Output::PARTS][Output::APART];
    float gate_up[GateUp::PARTS][GateUp::APART], down[Down::PARTS][Down::APART], head[2][Head::PARTS][Head::APART];
  } parts;
  alignas(16) float squares[HIDDEN / 4];        // of four elements of the residual stream each
  float4 residual[HIDDEN / CLUSTER / 4 * CLUSTERS];  // this block's elements of it, four to a thread
  float cos[HEAD_DIM / 2], sin[HEAD_DIM / 2];   // of the new token
  alignas(16) bf16 head_norms[QK_NORM ? LAYERS : 1][2][HEAD_DIM];  // of queries and of keys
  float q[QUERIES][HEAD_DIM], k[KEYS][HEAD_DIM];
  alignas(16) uint4 keys[AHEAD > 0 ? AHEAD : 1][AHEAD > 0 ? THREADS : 1], values[AHEAD > 0 ? AHEAD : 1][AHEAD > 0 ? THREADS : 1];
  float largest[WARPS][QUERIES], sums[WARPS][QUERIES];  // of a warp's keys
  alignas(16) float attended[SEEN];
  Barrier x_there, qkv_there, seen_there, units_there;
  Layer layers[LAYERS];
};
constexpr int MOST_SHARED = 232448, CHUNK = THREADS * 16 * HALVES;
constexpr int KEPT = (sizeof(Shared) + 127) / 128 * 128;
constexpr int RING = (MOST_SHARED - KEPT) / CHUNK;
constexpr int SHARED_BYTES = KEPT + RING * CHUNK;
static_assert(RING >= 2, "too little shared memory is left for the ring");

__device__ __forceinline__ float over_lanes(float x, int lanes) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&from);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}

// The weights of this thread, in the order in which it will need them.
struct Stream {
  const Step& step;
  const Shared& shared;
  uint4* ring;  // of this thread
  int slot, cluster, rank;

  int qkv_at, output_at, gate_up_at, down_at;  // where this thread's part of the first chunks lies in a weight

  __device__ Stream(const Step& step, const Shared& shared, uint4* ring, int cluster, int rank)
      : step(step), shared(shared), ring(ring), slot(0), cluster(cluster), rank(rank) {
    qkv_at = row_of<Qkv>(0) * HIDDEN + column_of<Qkv>(0);
    output_at = (rank * Output::ROWS + row_of<Output>(0)) * (HEADS * HEAD_DIM) + cluster * SEEN + column_of<Output>(0);
    gate_up_at = (cluster * UNITS + rank * MY_UNITS + row_of<GateUp>(0)) * HIDDEN + column_of<GateUp>(0);
    down_at = (rank * Down::ROWS + row_of<Down>(0)) * INTERMEDIATE + cluster * UNITS + column_of<Down>(0);
    if (ONE_HEAD) qkv_at += qkv_row(rank * Qkv::ROWS) * HIDDEN;
  }

  // In the weight, of a row of the cluster's.
  __device__ __forceinline__ int qkv_row(int row) const {
    const int first_key = cluster * QUERIES / SHARE;
    if (row < QUERIES * HEAD_DIM) return cluster * QUERIES * HEAD_DIM + row;
    if (row < (QUERIES + KEYS) * HEAD_DIM) return (HEADS + first_key - QUERIES) * HEAD_DIM + row;
    return (HEADS + KV_HEADS + first_key - QUERIES - KEYS) * HEAD_DIM + row;
  }

  // Of a chunk's first row and column.
  template <typename P> __device__ __forceinline__ static int row_of(int chunk) {
    const int first = P::SPLIT == WARPS ? 0 : threadIdx.x / 32 / P::SPLIT * P::TURNS;
    return (first + chunk / P::PIECES) * TALL + threadIdx.x % 32 / 4;
  }
  template <typename P> __device__ __forceinline__ static int column_of(int chunk) {
    return (threadIdx.x / 32 % P::SPLIT * P::PIECES + chunk % P::PIECES) * P::WIDE + threadIdx.x % 4 * (P::WIDE / 4);
  }

  // From the first chunk of a product to the nth, in a weight whose rows are so far apart.
  template <typename P> __device__ __forceinline__ static int further(int n, int apart) {
    return n / P::PIECES * TALL * apart + n % P::PIECES * P::WIDE;
  }

  // Where a row of chunk n of a layer lies, the first or the one that is 8 below. Both are constants, so little of this is left.
  __device__ __forceinline__ const Weight* in_layer(const Layer& layer, int n, int below) const {
    if (n < OUTPUT_AT) {
      if (ONE_HEAD) return layer.qkv + qkv_at + further<Qkv>(n, HIDDEN) + below * HIDDEN;
      const int row = qkv_row(rank * Qkv::ROWS + row_of<Qkv>(n) + below);
      return layer.qkv + row * HIDDEN + column_of<Qkv>(n);
    }
    if (n < GATE_UP_AT) return layer.output + output_at + further<Output>(n - OUTPUT_AT, HEADS * HEAD_DIM) + below * (HEADS * HEAD_DIM);
    if (n < DOWN_AT) {
      const bool up = row_of<GateUp>(n - GATE_UP_AT) + below >= MY_UNITS;
      return layer.gate_up + gate_up_at + further<GateUp>(n - GATE_UP_AT, HIDDEN) + (up ? INTERMEDIATE - MY_UNITS + below : below) * HIDDEN;
    }
    return layer.down + down_at + further<Down>(n - DOWN_AT, INTERMEDIATE) + below * INTERMEDIATE;
  }

  __device__ __forceinline__ static int64_t head_row(int turn) {  // the first of a block's
    return (static_cast<int64_t>(turn) * BLOCKS + blockIdx.x) * Head::ROWS;
  }
  __device__ __forceinline__ const bf16* in_head(int n, int below, int turn) const {  // past the end: the last row
    const int64_t row = min(head_row(turn) + row_of<Head>(n) + below, static_cast<int64_t>(VOCABULARY - 1));
    return step.head + row * HIDDEN + column_of<Head>(n);
  }

  __device__ __forceinline__ void bring(int n, int layer) {
    layer += n / LAYER_CHUNKS, n %= LAYER_CHUNKS;
    if (layer >= LAYERS) return bring_head(n + (layer - LAYERS) * LAYER_CHUNKS, 0);
    for (int half = 0; half < HALVES; half++) copy_16_aside(ring + (HALVES * slot + half) * THREADS, in_layer(shared.layers[layer], n, 8 * half));
    close_group_aside();
  }
  __device__ __forceinline__ void bring_head(int n, int turn) {
    turn += n / Head::CHUNKS, n %= Head::CHUNKS;
    if (turn < HEAD_TURNS)
      for (int half = 0; half < HALVES; half++) copy_16_aside(ring + (HALVES * slot + half) * THREADS, in_head(n, 8 * half, turn));
    close_group_aside();
  }

  // The next chunk; its slot is to be filled again before the next is taken.
  __device__ __forceinline__ void take(uint4 (&rows)[HALVES]) {
    wait_aside_for_all_but<RING - 1>();
    for (int half = 0; half < HALVES; half++) rows[half] = load_16_aside(ring + (HALVES * slot + half) * THREADS);
  }
  __device__ __forceinline__ void advance() { slot = slot == RING - 1 ? 0 : slot + 1; }
};

// A chunk as tensor cores take it. What is moved into place are the bits of a code: seven of them, put where bfloat16 has the
// last four of its exponent and the first three of its mantissa, are the number times 2^-120, of codes without a leading one
// too. (NaN, which no weight of numbers is rounded to, is 480.) So x is multiplied by 2^64 and a sum by 2^56: between 2^-61
// and 2^63, numbers of x leave products of all codes, and sums of as many as there are, well within float's exponents.
constexpr float UP = 0x1p64f, BACK = 0x1p56f;
template <typename P> struct Chunk {
  uint32_t matrices[HALVES * P::ALONG][4];

  __device__ __forceinline__ static uint32_t expand(uint32_t codes) {  // the second and the fourth
    return codes & 0x80008000 | codes >> 4 & 0x07f007f0;
  }
  __device__ __forceinline__ void take(Stream& stream) {
    uint4 rows[HALVES];
    stream.take(rows);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const uint32_t words[4] = {rows[half].x, rows[half].y, rows[half].z, rows[half].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (P::CODED) matrices[i / 2][i % 2 * 2] = expand(words[i] << 8), matrices[i / 2][i % 2 * 2 + 1] = expand(words[i]);
        else matrices[half][i] = words[i];
      }
    }
  }
};

// The first chunks of a product, MOST at most. Of queries, keys and values as many as were timed best on an H200 in bfloat16; of
// the others, and of codes, as many as there are registers for.
constexpr int HELD_QKV = CODES ? 2 : 0, HELD_OUTPUT = 2, HELD_GATE_UP = 6, HELD_DOWN = 3;
template <typename P, int MOST> struct Held {
  static constexpr int COUNT = P::CHUNKS < MOST ? P::CHUNKS : MOST;
  Chunk<P> chunks[COUNT > 0 ? COUNT : 1];
};

// This thread's columns of x, for all rows of a product. To tensor cores, 8 elements of a row of weights that a thread has
// are 4 of row i and 4 of row i + 8, at the same 4 places; so x stands in two columns, for the one and for the other row,
// and twice: rounded, and what that took away. Of the products of rows and columns, four are a part of the row's sum:
//
//     row i      with  column 0, 1:  elements 0 1 4 5, rounded and the rest   in thread 0 of the four
//     row i + 8  with  column 2, 3:  elements 2 3 6 7, rounded and the rest   in thread 1
//
// Of codes, these are elements 0 2 4 6 and 1 3 5 7.
template <typename P> struct Columns {
  uint32_t x[P::PIECES][P::ALONG][2];

  __device__ __forceinline__ explicit Columns(const float* from) {
    const int column = threadIdx.x % 32 / 4;  // from 4 on, nobody looks
#pragma unroll
    for (int piece = 0; piece < P::PIECES; piece++) {
      const int first = Stream::column_of<P>(piece);
#pragma unroll
      for (int i = 0; i < 2 * P::ALONG; i++) {
        float2 pair = *reinterpret_cast<const float2*>(from + P::place_of(first + 4 * i) + column / 2 % 2 * 2);
        if (P::CODED) pair.x *= UP, pair.y *= UP;
        __nv_bfloat162 rounded = __float22bfloat162_rn(pair);
        const float2 back = __bfloat1622float2(rounded);
        if (column % 2) rounded = __float22bfloat162_rn(make_float2(pair.x - back.x, pair.y - back.y));
        x[piece][i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(&rounded);
      }
    }
  }
};

// The parts of a product's sums, of which HELD chunks are there already; `bring(n)` fills the slot of its nth chunk again.
// Between two products with the same `parts`, all threads must meet once more.
template <typename P, int HELD_, typename Bring>
__device__ __forceinline__ void multiply(
    Stream& stream, const Columns<P>& columns, const Chunk<P>* held, float (&parts)[P::PARTS][P::APART], Bring bring) {
  const int t = threadIdx.x, fourth = t % 4;
  float* mine = parts[t / 32 % P::SPLIT * 2 + fourth % 2] + Stream::row_of<P>(0);
#pragma unroll
  for (int turn = 0; turn < P::TURNS; turn++) {
    float sums[HALVES * P::ALONG][4]{};
#pragma unroll
    for (int piece = 0; piece < P::PIECES; piece++) {
      const int n = turn * P::PIECES + piece;
      Chunk<P> chunk;
      if (n < HELD_) {
        chunk = held[n];
      } else {
        chunk.take(stream);
        bring(n);
        stream.advance();
      }
#pragma unroll
      for (int i = 0; i < HALVES * P::ALONG; i++) multiply_add<bf16>(sums[i], chunk.matrices[i], columns.x[piece][i % P::ALONG]);
    }
    if (fourth < 2) {
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        float sum = 0;
#pragma unroll
        for (int i = half * P::ALONG; i < (half + 1) * P::ALONG; i++)
          sum += fourth == 0 ? sums[i][0] + sums[i][1] : sums[i][2] + sums[i][3];
        mine[turn * TALL + 8 * half] = sum;
      }
    }
  }
  __syncthreads();
}

// Of the product that begins with chunk FIRST of the layer.
template <int FIRST, typename P, int MOST> __device__ __forceinline__ void hold(Stream& stream, int layer, Held<P, MOST>& held) {
#pragma unroll
  for (int n = 0; n < Held<P, MOST>::COUNT; n++) {
    held.chunks[n].take(stream);
    stream.bring(FIRST + n + RING, layer);
    stream.advance();
  }
  if (P::CODED) {  // and make numbers of them, which the compiler would do after the wait
#pragma unroll
    for (int n = 0; n < Held<P, MOST>::COUNT; n++) {
      const auto& m = held.chunks[n].matrices;
      compute_here(m[0][0] ^ m[0][1] ^ m[0][2] ^ m[0][3] ^ m[1][0] ^ m[1][1] ^ m[1][2] ^ m[1][3]);
    }
  }
}
template <int FIRST, typename P, int MOST>
__device__ __forceinline__ void multiply_in_layer(
    Stream& stream, int layer, const float* from, const Held<P, MOST>& held, float (&parts)[P::PARTS][P::APART]) {
  multiply<P, Held<P, MOST>::COUNT>(stream, Columns<P>(from), held.chunks, parts, [&](int n) { stream.bring(FIRST + n + RING, layer); });
}

// The sum of a row, in all LANES threads of it.
template <typename P> __device__ __forceinline__ float sum_of(const float (&parts)[P::PARTS][P::APART], int row, bool there) {
  const int lane = threadIdx.x % P::LANES;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < P::PARTS; i += P::LANES)
    if (there) sum += parts[i + lane][row];
  return over_lanes(sum, P::LANES) * (P::CODED ? BACK : 1);
}

// What this block has of the residual stream, which is the same in all clusters: OWN elements, of which a thread has four. The
// CLUSTERS threads of the same four each wait for another cluster's part of them.
struct Residual {
  static constexpr int OWN = HIDDEN / CLUSTER, LOOKING = OWN / 4 * CLUSTERS, EACH = (LOOKING + THREADS - 1) / THREADS;
  static_assert(LOOKING % 32 == 0 && 32 % CLUSTERS == 0, "whole warps look");
  float4* x;  // [EACH] of this thread, in shared memory: registers are few
  uint2 weights[EACH];
  int first;  // of the block's elements

  __device__ __forceinline__ static bool has(int i) { return i * THREADS + threadIdx.x < LOOKING; }
  __device__ __forceinline__ static int at(int i) { return (i * THREADS + threadIdx.x) / CLUSTERS * 4; }
  __device__ __forceinline__ static void unpack_four(const uint2& from, float (&to)[4]) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&from);
    const float2 low = __bfloat1622float2(pairs[0]), high = __bfloat1622float2(pairs[1]);
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  }

  __device__ __forceinline__ Residual(float4* all, const bf16* row, int rank) : x(all + threadIdx.x), first(rank * OWN) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!has(i)) continue;
      float e[4];
      unpack_four(*reinterpret_cast<const uint2*>(row + first + at(i)), e);
      x[i * THREADS] = make_float4(e[0], e[1], e[2], e[3]);
    }
  }
  __device__ __forceinline__ void bring_weights(const bf16* norm) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (has(i)) weights[i] = *reinterpret_cast<const uint2*>(norm + first + at(i));
  }
  __device__ __forceinline__ void add(const uint64_t* parts, unsigned mark) {  // [CLUSTERS, HIDDEN]
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!has(i)) continue;
      float part[4];
      wait_for_marked(parts + threadIdx.x % CLUSTERS * HIDDEN + first + at(i), mark, part);
      for (float& each : part) each = over_lanes(each, CLUSTERS);
      const float4 old = x[i * THREADS];
      x[i * THREADS] = make_float4(old.x + part[0], old.y + part[1], old.z + part[2], old.w + part[3]);
    }
  }
  // x times the norm's weights, for product P, and the squares of x to all blocks of the cluster, which thereby have all of x.
  template <typename P> __device__ __forceinline__ void share(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!has(i)) continue;
      float w[4];
      unpack_four(weights[i], w);
      const float4 e = x[i * THREADS];
      const float squares = e.x * e.x + e.y * e.y + e.z * e.z + e.w * e.w;
      float4 four = make_float4(e.x * w[0], e.y * w[1], e.z * w[2], e.w * w[3]);
      if (P::CODED) four = make_float4(four.x, four.z, four.y, four.w);
      for (int to = threadIdx.x % CLUSTERS; to < CLUSTER; to += CLUSTERS) {
        send(to, reinterpret_cast<float4*>(shared.x + P::place_of(first + at(i))), four, shared.x_there);
        send(to, shared.squares + (first + at(i)) / 4, squares, shared.x_there);
      }
    }
  }
};

// Where some warps do not look, those that do begin with it, and hold what they will multiply while what they share is on its
// way; where all look, that is too short a time, and so it is where codes have to become numbers.
constexpr bool LOOK_FIRST = !CODES && Residual::LOOKING < THREADS;

// 1 / rms(x), with which the sums of x times a norm's weights are still to be multiplied.
__device__ __forceinline__ float norm_factor(const Shared& shared, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = threadIdx.x % 32; i < HIDDEN / 16; i += 32) {
    const float4 four = reinterpret_cast<const float4*>(shared.squares)[i];
    squares += four.x + four.y + four.z + four.w;
  }
  return rsqrtf(over_lanes(squares, 32) / HIDDEN + eps);
}

// Of codes, what the sums of this thread's rows are multiplied with in the end; they are on their way before they are needed.
struct Scales {
  float qkv = 1, output = 1, gate = 1, up = 1, down = 1;

  template <typename P> __device__ __forceinline__ static float scale_of(const float* scales, int first) {
    const int row = threadIdx.x / P::LANES;
    return row < P::SUMS ? __ldg(scales + first + row) : 0;
  }
#if CODES
  __device__ __forceinline__ void bring_attention(const Layer& layer, const Stream& stream) {
    const int row = threadIdx.x / Qkv::LANES;
    if (row < Qkv::ROWS) qkv = __ldg(layer.qkv_scale + stream.qkv_row(stream.rank * Qkv::ROWS + row));
    if (threadIdx.x * 32 < Output::ROWS) fetch_to_l2(layer.output_scale + stream.rank * Output::ROWS + threadIdx.x * 32);
  }
  __device__ __forceinline__ void bring_output(const Layer& layer, const Stream& stream) {
    output = scale_of<Output>(layer.output_scale, stream.rank * Output::ROWS);
  }
  __device__ __forceinline__ void bring_mlp(const Layer& layer, const Stream& stream) {
    const int first = stream.cluster * UNITS + stream.rank * MY_UNITS;
    gate = scale_of<GateUp>(layer.gate_up_scale, first), up = scale_of<GateUp>(layer.gate_up_scale, INTERMEDIATE + first);
    down = scale_of<Down>(layer.down_scale, stream.rank * Down::ROWS);
  }
#else
  __device__ __forceinline__ void bring_attention(const Layer&, const Stream&) {}
  __device__ __forceinline__ void bring_output(const Layer&, const Stream&) {}
  __device__ __forceinline__ void bring_mlp(const Layer&, const Stream&) {}
#endif
};

// What a thread knows of attention from the beginning: its lane's part of the angles, and which keys are its warp's.
struct Attention {
  static constexpr int TURNED = HEAD_DIM / 64;        // pairs of a lane
  static constexpr int LANES = HEAD_DIM / 8;          // to a key
  static constexpr int AT_ONCE = THREADS / LANES;     // keys of a block
  int position, from, to;
  int new_slot, ahead[AHEAD + 1];  // places in the pool, in tokens

  __device__ __forceinline__ static int element() { return threadIdx.x % LANES * 8; }
  __device__ __forceinline__ int place(int round) const { return from + round * AT_ONCE + static_cast<int>(threadIdx.x) / LANES; }
  __device__ __forceinline__ static int slot_of(const Step& step, int place) {
    return __ldg(step.pages + place / step.page) * step.page + place % step.page;
  }
  __device__ __forceinline__ static int64_t offset(const Step& step, int layer, int slot, int head) {
    return ((layer * step.pool * step.page + slot) * KV_HEADS + head) * HEAD_DIM + element();
  }

  __device__ Attention(Shared& shared, const Step& step, int rank, int first_key) {
    position = static_cast<int>(*step.length) - 1;
    const int piece = (position + CLUSTER - 1) / CLUSTER;
    from = min(rank * piece, position), to = min(from + piece, position);
    new_slot = slot_of(step, position);
    for (int round = 0; round < AHEAD; round++)
      ahead[round] = place(round) < to ? slot_of(step, place(round)) : 0;
    if (const int i = threadIdx.x; i < HEAD_DIM / 2) {
      shared.cos[i] = step.cos[static_cast<int64_t>(position) * (HEAD_DIM / 2) + i];
      shared.sin[i] = step.sin[static_cast<int64_t>(position) * (HEAD_DIM / 2) + i];
    }
  }

  // Send off the first keys and values of a layer (of its first head of keys, where there are several): a group of copies
  // that is the thread's own, as the ring's are, ahead of all that are brought while it takes the chunks of Qkv.
  __device__ __forceinline__ void bring(Shared& shared, const Step& step, int layer, int first_key) {
#pragma unroll
    for (int round = 0; round < AHEAD; round++) {
      if (place(round) >= to) continue;
      const int64_t at = offset(step, layer, ahead[round], first_key);
      copy_16_aside(&shared.keys[round][threadIdx.x], step.keys + at);
      copy_16_aside(&shared.values[round][threadIdx.x], step.values + at);
    }
    if (AHEAD > 0) close_group_aside();
    if (element() % 64 == 0) {  // of the others, 128 bytes at a time, only as far as the L2
      for (int round = AHEAD; place(round) < to; round++) {
        const int64_t at = offset(step, layer, slot_of(step, place(round)), first_key);
        fetch_to_l2(step.keys + at), fetch_to_l2(step.values + at);
      }
    }
  }

  // Queries and keys, a head to a warp: normalised, turned, and the queries scaled for powers of two. A lane has elements
  // lane, lane + 32, …, of which those half a head apart are turned together.
  __device__ __forceinline__ void turn(Shared& shared, const Step& step, int layer) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= QUERIES + KEYS) return;
    float x[2 * TURNED], squares = 0;
#pragma unroll
    for (int i = 0; i < 2 * TURNED; i++) {
      x[i] = shared.received.qkv[warp * HEAD_DIM + lane + 32 * i];
      squares += x[i] * x[i];
    }
    if (QK_NORM) {
      const float scale = rsqrtf(over_lanes(squares, 32) / HEAD_DIM + step.eps);
#pragma unroll
      for (int i = 0; i < 2 * TURNED; i++)
        x[i] *= scale * __bfloat162float(shared.head_norms[layer][warp >= QUERIES][lane + 32 * i]);
    }
#pragma unroll
    for (int i = 0; i < TURNED; i++) {
      const float cos = shared.cos[lane + 32 * i], sin = shared.sin[lane + 32 * i];
      const float low = x[i] * cos - x[i + TURNED] * sin, high = x[i + TURNED] * cos + x[i] * sin;
      if (warp < QUERIES) {
        const float scale = step.scale * 1.4426950408889634f;
        shared.q[warp][lane + 32 * i] = low * scale, shared.q[warp][lane + 32 * (i + TURNED)] = high * scale;
      } else {  // rounded, as the cache has it
        shared.k[warp - QUERIES][lane + 32 * i] = __bfloat162float(__float2bfloat16_rn(low));
        shared.k[warp - QUERIES][lane + 32 * (i + TURNED)] = __bfloat162float(__float2bfloat16_rn(high));
      }
    }
  }

  // Of one head of keys: what its queries see of this block's piece of the text, a key to LANES threads. The last block has
  // the new token too, and one of those that have this head keeps it.
  __device__ __forceinline__ void see(Shared& shared, const Step& step, int layer, int head, int first_key, bool last, bool keeps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float q[PER_KEY][8], seen[PER_KEY][8], largest[PER_KEY], sum[PER_KEY];
#pragma unroll
    for (int g = 0; g < PER_KEY; g++) {
      largest[g] = -1e30f, sum[g] = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) q[g][i] = shared.q[head * PER_KEY + g][element() + i], seen[g][i] = 0;
    }
    auto meet = [&](const float (&k)[8], const float (&v)[8], bool there) {
#pragma unroll
      for (int g = 0; g < PER_KEY; g++) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) score = fmaf(q[g][i], k[i], score);
        score = over_lanes(score, LANES);
        if (!there) continue;
        const float top = fmaxf(largest[g], score), old = exp2f(largest[g] - top), weight = exp2f(score - top);
#pragma unroll
        for (int i = 0; i < 8; i++) seen[g][i] = seen[g][i] * old + weight * v[i];
        sum[g] = sum[g] * old + weight, largest[g] = top;
      }
    };
    auto meet_kept = [&](const uint4& packed_key, const uint4& packed_value, bool there) {
      float k[8], v[8];
      unpack(packed_key, k), unpack(packed_value, v);
      meet(k, v, there);
    };
    if (last && warp == 0) {  // the new token
      float k[8], v[8];
      uint4 packed_key, packed_value;
      bf16 *kept_key = reinterpret_cast<bf16*>(&packed_key), *kept_value = reinterpret_cast<bf16*>(&packed_value);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        k[i] = shared.k[head][element() + i];
        kept_key[i] = __float2bfloat16_rn(k[i]);
        kept_value[i] = __float2bfloat16_rn(shared.received.qkv[(QUERIES + KEYS + head) * HEAD_DIM + element() + i]);
        v[i] = __bfloat162float(kept_value[i]);
      }
      meet(k, v, lane < LANES);
      if (keeps && lane < LANES) {
        const int64_t at = offset(step, layer, new_slot, first_key + head);
        *reinterpret_cast<uint4*>(step.keys + at) = packed_key;
        *reinterpret_cast<uint4*>(step.values + at) = packed_value;
      }
    }
    if (AHEAD > 0) wait_aside_for_all_but<Qkv::CHUNKS>();
#pragma unroll
    for (int round = 0; round < AHEAD; round++)
      if (from + round * AT_ONCE < to)
        meet_kept(load_16_aside(&shared.keys[round][threadIdx.x]), load_16_aside(&shared.values[round][threadIdx.x]), place(round) < to);
    for (int round = AHEAD; from + round * AT_ONCE < to; round++) {
      const bool there = place(round) < to;
      uint4 packed_key{}, packed_value{};
      if (there) {
        const int64_t at = offset(step, layer, slot_of(step, place(round)), first_key + head);
        packed_key = *reinterpret_cast<const uint4*>(step.keys + at);
        packed_value = *reinterpret_cast<const uint4*>(step.values + at);
      }
      meet_kept(packed_key, packed_value, there);
    }
#pragma unroll
    for (int g = 0; g < PER_KEY; g++) {  // the keys of a warp together
#pragma unroll
      for (int apart = 16; apart >= LANES; apart /= 2) {
        const float other = __shfl_xor_sync(~0u, largest[g], apart), top = fmaxf(largest[g], other);
        const float mine = exp2f(largest[g] - top), theirs = exp2f(other - top);
        sum[g] = sum[g] * mine + __shfl_xor_sync(~0u, sum[g], apart) * theirs, largest[g] = top;
#pragma unroll
        for (int i = 0; i < 8; i++) seen[g][i] = seen[g][i] * mine + __shfl_xor_sync(~0u, seen[g][i], apart) * theirs;
      }
      const int query = head * PER_KEY + g;
      if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < 8; i++) shared.parts.seen[warp][query * HEAD_DIM + element() + i] = seen[g][i];
      }
      if (lane == 0) shared.largest[warp][query] = largest[g], shared.sums[warp][query] = sum[g];
    }
  }
};

// Of COUNT pieces of a text, each with how much of it is seen, its largest score and the sum of weights: element e of what is
// seen of all, and what the sums come to, both relative to `top`.
template <int COUNT, typename Piece>
__device__ __forceinline__ void merge(Piece piece, float& top, float& sum, float& total) {
  top = -1e30f, sum = total = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) top = fmaxf(top, piece(i).largest);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const auto one = piece(i);
    const float weight = exp2f(one.largest - top);
    total = fmaf(weight, one.seen, total), sum = fmaf(weight, one.sum, sum);
  }
}
struct Seen {
  float seen, largest, sum;
};

// The block's piece of the text to all blocks of the cluster, four elements at a time.
__device__ __forceinline__ void send_seen(Shared& shared, int rank) {
  auto& mine = shared.received.of_block[rank];
  for (int e = threadIdx.x; e < SEEN; e += THREADS) {
    float top, sum, total;
    const int query = e / HEAD_DIM, first = threadIdx.x % 4;
    merge<WARPS>([&](int i) { return Seen{shared.parts.seen[i][e], shared.largest[i][query], shared.sums[i][query]}; }, top, sum, total);
    const float4 four = make_float4(
        __shfl_sync(~0u, total, 0, 4), __shfl_sync(~0u, total, 1, 4), __shfl_sync(~0u, total, 2, 4), __shfl_sync(~0u, total, 3, 4));
    for (int to = first; to < CLUSTER; to += 4) send(to, reinterpret_cast<float4*>(&mine.seen[e - first]), four, shared.seen_there);
    if (const int to = e % HEAD_DIM; to < CLUSTER) {
      send(to, &mine.largest[query], top, shared.seen_there);
      send(to, &mine.sums[query], sum, shared.seen_there);
    }
  }
}

__global__ void __launch_bounds__(THREADS, 1) decode_step_kernel(const __grid_constant__ Step step) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = cluster.block_rank(), number = blockIdx.x / CLUSTER, first_key = number * QUERIES / SHARE;
  const int t = threadIdx.x;
  const bool last = rank == CLUSTER - 1, keeps = number * QUERIES % SHARE == 0;
  uint64_t* output_parts = step.parts + number * HIDDEN;
  uint64_t* down_parts = output_parts + CLUSTERS * HIDDEN;
  Received& received = shared.received;
  const unsigned marked = *step.marked;
  constexpr int X_BYTES = sizeof(shared.x) + sizeof(shared.squares);

  for (int i = t; i < LAYERS; i += THREADS) shared.layers[i] = step.layers[i];
  if (t == 0) {
    for (Barrier* each : {&shared.x_there, &shared.qkv_there, &shared.seen_there, &shared.units_there}) each->begin(1);
    barriers_begun();
  }
  __syncthreads();
  Stream stream(step, shared, reinterpret_cast<uint4*>(memory + KEPT) + t, number, rank);
#pragma unroll
  for (int n = 0; n < RING; n++) {
    stream.bring(n, 0);
    stream.advance();
  }
  Residual residual(shared.residual, step.embedding + *step.ids * HIDDEN, rank);
  Attention attention(shared, step, rank, first_key);
  residual.bring_weights(shared.layers[0].attention_norm);
  attention.bring(shared, step, 0, first_key);
  if (QK_NORM) {
    constexpr int EACH = HEAD_DIM / 8;  // 16 bytes
    for (int i = t; i < 2 * EACH * LAYERS; i += THREADS) {
      const Layer& layer = shared.layers[i / (2 * EACH)];
      const uint4* norm = reinterpret_cast<const uint4*>(i / EACH % 2 ? layer.k_norm : layer.q_norm);
      reinterpret_cast<uint4*>(shared.head_norms)[i] = norm[i % EACH];
    }
  }
  Scales scales;
  scales.bring_attention(shared.layers[0], stream);
  Held<Qkv, HELD_QKV> of_qkv;
  hold<0>(stream, 0, of_qkv);
  cluster.sync();  // all have begun, and can be sent to
  residual.share<Qkv>(shared);

  for (int layer = 0; layer < LAYERS; layer++) {
    const uint32_t round = layer % 2;
    const unsigned mark = marked + layer + 1;
    shared.x_there.wait_for(X_BYTES, 0);
    float scale = norm_factor(shared, step.eps);
    multiply_in_layer<0>(stream, layer, shared.x, of_qkv, shared.parts.qkv);
    {
      const int row = t / Qkv::LANES;
      const float sum = sum_of<Qkv>(shared.parts.qkv, row, row < Qkv::ROWS) * scale * scales.qkv;
      for (int to = t % Qkv::LANES; row < Qkv::ROWS && to < CLUSTER; to += Qkv::LANES)
        send(to, &received.qkv[rank * Qkv::ROWS + row], sum, shared.qkv_there);
    }
    shared.qkv_there.wait_for(sizeof(received.qkv), round);

    attention.turn(shared, step, layer);
    __syncthreads();
    for (int head = 0; head < KEYS; head++) attention.see(shared, step, layer, head, first_key, last, keeps);
    __syncthreads();
    send_seen(shared, rank);
    scales.bring_output(shared.layers[layer], stream);
    Held<Output, HELD_OUTPUT> of_output;
    hold<OUTPUT_AT>(stream, layer, of_output);
    shared.seen_there.wait_for(CLUSTER * (SEEN + 2 * QUERIES) * sizeof(float), round);
    for (int e = t; e < SEEN; e += THREADS) {
      float top, sum, total;
      const int query = e / HEAD_DIM;
      merge<CLUSTER>([&](int i) {
        const auto& block = received.of_block[i];
        return Seen{block.seen[e], block.largest[query], block.sums[query]};
      }, top, sum, total);
      shared.attended[Output::place_of(e)] = total / sum;
    }
    __syncthreads();
    multiply_in_layer<OUTPUT_AT>(stream, layer, shared.attended, of_output, shared.parts.output);
    {
      const int row = t / Output::LANES;
      const float sum = sum_of<Output>(shared.parts.output, row, row < Output::ROWS) * scales.output;
      if (row < Output::ROWS && t % Output::LANES == 0) put_marked(output_parts + rank * Output::ROWS + row, sum, mark);
    }
    residual.bring_weights(shared.layers[layer].mlp_norm);
    scales.bring_mlp(shared.layers[layer], stream);
    Held<GateUp, HELD_GATE_UP> of_gate_up;
    if (!LOOK_FIRST) hold<GATE_UP_AT>(stream, layer, of_gate_up);
    residual.add(step.parts, mark);
    residual.share<GateUp>(shared);
    if (LOOK_FIRST) hold<GATE_UP_AT>(stream, layer, of_gate_up);
    shared.x_there.wait_for(X_BYTES, 1);

    scale = norm_factor(shared, step.eps);
    multiply_in_layer<GATE_UP_AT>(stream, layer, shared.x, of_gate_up, shared.parts.gate_up);
    {
      const int unit = t / GateUp::LANES;
      const float gate = sum_of<GateUp>(shared.parts.gate_up, unit, unit < MY_UNITS) * scale * scales.gate;
      const float up = sum_of<GateUp>(shared.parts.gate_up, MY_UNITS + unit, unit < MY_UNITS) * scale * scales.up;
      for (int to = t % GateUp::LANES; unit < MY_UNITS && to < CLUSTER; to += GateUp::LANES)
        send(to, &received.units[Down::place_of(rank * MY_UNITS + unit)], gate / (1 + __expf(-gate)) * up, shared.units_there);
    }
    Held<Down, HELD_DOWN> of_down;
    hold<DOWN_AT>(stream, layer, of_down);
    shared.units_there.wait_for(sizeof(received.units), round);

    multiply_in_layer<DOWN_AT>(stream, layer, received.units, of_down, shared.parts.down);
    {
      const int row = t / Down::LANES;
      const float sum = sum_of<Down>(shared.parts.down, row, row < Down::ROWS) * scales.down;
      if (row < Down::ROWS && t % Down::LANES == 0) put_marked(down_parts + rank * Down::ROWS + row, sum, mark);
    }
    if (layer + 1 < LAYERS) {
      residual.bring_weights(shared.layers[layer + 1].attention_norm);
      attention.bring(shared, step, layer + 1, first_key);
      scales.bring_attention(shared.layers[layer + 1], stream);
      if (!LOOK_FIRST) hold<0>(stream, layer + 1, of_qkv);
    } else {
      residual.bring_weights(step.norm);
    }
    residual.add(step.parts + CLUSTERS * HIDDEN, mark);
    if (layer + 1 == LAYERS) {
      residual.share<Head>(shared);
    } else {
      residual.share<Qkv>(shared);
      if (LOOK_FIRST) hold<0>(stream, layer + 1, of_qkv);
    }
  }
  if (blockIdx.x == 0 && t == 0) *step.marked = marked + LAYERS;  // all have begun with what it was

  shared.x_there.wait_for(X_BYTES, 0);
  const float scale = norm_factor(shared, step.eps);
  const Columns<Head> columns(shared.x);
  for (int turn = 0; turn < HEAD_TURNS; turn++) {
    multiply<Head, 0>(stream, columns, nullptr, shared.parts.head[turn % 2], [&](int n) { stream.bring_head(n + RING, turn); });
    const int row = t / Head::LANES;
    const float sum = sum_of<Head>(shared.parts.head[turn % 2], row, row < Head::ROWS);
    const int64_t at = Stream::head_row(turn) + row;
    if (t % Head::LANES == 0 && row < Head::ROWS && at < VOCABULARY) step.logits[at] = sum * scale;
  }
}

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];
  explicit Launch(cudaStream_t stream) {
    cudaFuncSetAttribute(decode_step_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    cudaFuncSetAttribute(decode_step_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;  // all blocks run at a time, or none does
    attributes[1].val.cooperative = 1;
    config.gridDim = BLOCKS, config.blockDim = THREADS, config.dynamicSmemBytes = SHARED_BYTES, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
  }
};

// Null where all clusters find room on this GPU at a time, else why not.
EXPORT decode_step_fits(cudaStream_t stream) {
  Launch launch(stream);
  launch.config.numAttrs = 1;
  int clusters = 0;
  cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, decode_step_kernel, &launch.config);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return clusters >= CLUSTERS ? nullptr : "this GPU has no room for as many clusters at a time";
}

EXPORT decode_step(
    const void* layers, const void* embedding, const void* head, const void* norm, const void* cos, const void* sin,
    const void* ids, const void* length, const void* pages, void* keys, void* values, void* parts, void* logits,
    void* marked, int64_t pool, int64_t page, double eps, double scale, cudaStream_t stream) {
  Step step{
      static_cast<const Layer*>(layers), static_cast<const bf16*>(embedding), static_cast<const bf16*>(head),
      static_cast<const bf16*>(norm), static_cast<const float*>(cos), static_cast<const float*>(sin),
      static_cast<const int64_t*>(ids), static_cast<const int64_t*>(length), static_cast<const int64_t*>(pages),
      static_cast<bf16*>(keys), static_cast<bf16*>(values), static_cast<uint64_t*>(parts), static_cast<float*>(logits),
      static_cast<unsigned*>(marked), pool, static_cast<int>(page), static_cast<float>(eps), static_cast<float>(scale)};
  Launch launch(stream);
  const cudaError_t error = cudaLaunchKernelEx(&launch.config, decode_step_kernel, step);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
