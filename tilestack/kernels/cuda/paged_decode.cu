// Attention over pages where every sequence has one new token: out[s, h] = softmax(scale · q[s, h] · keys[s]ᵀ) · values[s].
//
// The time is that of reading keys and values once, so all that counts is that the memory never waits. The GROUP heads that
// share keys are columns of one product, of which tensor cores have eight, and keys are its rows:
//
//     scores   [16 keys, 8 queries] += keys [16, 16 of DIM] · queries [16 of DIM, 8]
//     sums     [16 of DIM, 8 queries] += valuesᵀ [16 of DIM, 16 keys] · weights [16 keys, 8]
//
//     unit     a sequence, a head of keys, and one of at most `splits` parts of the text
//     block    a unit: WARPS warps take its pieces of 16 keys in turns, each with softmax of its own, merged at the end
//     ring     of a warp: SLOTS pieces on their way, by cp.async, 16 bytes a thread and rows as long as they are
//
// Numbers are not moved on between threads. The sum along DIM does not care for its order, nor do the rows of valuesᵀ: so a
// thread reads 16 bytes at a time, and they are what tensor cores want from it, of keys lane / 4 and 8 further, and of values
// 2 (lane % 4), 1, 8 and 9 further. Those that eight threads read at a time lie in other banks (`key_at`, `value_at`). Weights
// come out of the first product by rows and go into the second by columns, for which there is an instruction (`turned`).
//
// Codes of fp8 become float16, which holds them exactly; so do queries, relative to their largest. Scales of keys are multiplied
// into scores, those of values into weights, relative to the largest so far or nearly. All that they are relative to are powers
// of two, so that nothing is rounded by it.
//
// As macros: DIM, GROUP, PAGE (tokens of one, a multiple of 16), HALF (q's dtype as build.py numbers it), CODES (whether pages
// hold fp8), LONG (whether indices have 64 bits), WARPS, SLOTS.
#include "ptx.cuh"

template <int NUMBER> struct HalfOf { using type = __half; };
template <> struct HalfOf<3> { using type = __nv_bfloat16; };
template <bool WIDE> struct IntegerOf { using type = int32_t; };
template <> struct IntegerOf<true> { using type = int64_t; };
using T = HalfOf<HALF>::type;
using Operand = HalfOf<CODES ? 2 : HALF>::type;  // of the products
using Integer = IntegerOf<LONG>::type;

constexpr int KEYS = 16, QUERIES = 8, THREADS = 32 * WARPS;
constexpr int SIZE = CODES ? 1 : 2, ROW = DIM * SIZE, PIECES = ROW / 16, NUMBERS = 16 / SIZE;  // of a key; NUMBERS in a piece
constexpr int KEY_PIECES = PIECES / 4, VALUE_PIECES = PIECES / 8;  // of a key, that are a thread's
constexpr int STEPS = NUMBERS / 4;                                 // products of a piece of keys
constexpr int TILES = DIM / 16;
constexpr int HELD = KEYS * ROW, SLOT = 2 * HELD + (CODES ? 2 * KEYS * 4 : 0);  // bytes: keys, values, and scales of both
constexpr int LEAST_PIECES = 8;  // of 16 keys that are worth a block
constexpr float SLACK = 4;  // powers of two by which a weight may be above one before what was added up is scaled anew
constexpr float NEARLY = 4;  // times the unit that scales of values are relative to may be
constexpr float ROOM = 512;  // for what is small in float16, where such weights are 16 · 4 at most
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(GROUP <= QUERIES && PAGE % KEYS == 0 && (PIECES == 8 || PIECES == 16), "shapes of tiles");

struct Strides {
  int64_t page, token, head;
};
struct Batch {
  const T* q;                             // [tokens, kv_heads, GROUP, DIM]
  const unsigned char *keys, *values;     // [pages, PAGE, kv_heads, DIM]; strides of both in bytes
  const float *key_scale, *value_scale;   // [pages, PAGE, kv_heads]
  const Integer *tables, *lengths, *ends; // [sequences, blocks], [sequences], [sequences + 1]
  T* out;                                 // as q
  float *parts, *sums;                    // [sequences · kv_heads, splits, GROUP, DIM], […, GROUP, 2]
  unsigned* counts;                       // [sequences · kv_heads], zero
  int tokens, sequences, kv_heads, splits;
  int64_t q_token, q_head, table_row, table_block;
  Strides key, value, key_scales, value_scales;
  float scale;
};

// Of a part of the text: for each query the largest score and the sum of weights relative to it, and the weighted values.
struct Part {
  float values[GROUP * DIM], largest[GROUP], sum[GROUP];
};
constexpr int RING = WARPS * SLOTS * SLOT;
constexpr int SHARED_BYTES = RING > WARPS * static_cast<int>(sizeof(Part)) ? RING : WARPS * static_cast<int>(sizeof(Part));

__device__ __forceinline__ float largest_of_keys(float x) {  // over the lanes that have other keys of the same queries
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
__device__ __forceinline__ float sum_of_keys(float x) {
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}
__device__ __forceinline__ uint32_t pair(float low, float high) {
  const Operand both[2] = {rounded<Operand>(low), rounded<Operand>(high)};
  uint32_t word;
  memcpy(&word, both, 4);
  return word;
}
__device__ __forceinline__ uint32_t word_of(const uint4& piece, int number) {
  return number == 0 ? piece.x : number == 1 ? piece.y : number == 2 ? piece.z : piece.w;
}
__device__ __forceinline__ uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
__device__ __forceinline__ float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// The largest power of two that is not above x, at least 2^-112.
__device__ __forceinline__ float power_of_two(float x) {
  return as_float(max(as_bits(x) & 0x7f800000u, 0x07800000u));
}
__device__ __forceinline__ float inverse_of_power(float x) { return as_float(0x7f000000u - as_bits(x)); }

// What a thread has of the queries, as the right operand of scores, and what scores of its two queries are multiplied with.
struct Queries {
  uint32_t pairs[KEY_PIECES * STEPS][2];
  float factor[2];

  __device__ Queries(const T* q, int64_t apart, float scale) {
    const int lane = threadIdx.x % 32, mine = lane / 4, fourth = lane % 4;
    uint2 four[KEY_PIECES * STEPS];
#pragma unroll
    for (int step = 0; step < KEY_PIECES * STEPS; step++) {
      const int element = (fourth + step / STEPS * 4) * NUMBERS + step % STEPS * 4;
      four[step] = mine < GROUP ? *reinterpret_cast<const uint2*>(q + mine * apart + element) : uint2{0, 0};
    }
    float unit = 1;
    if constexpr (CODES) {
      float most = 0;
#pragma unroll
      for (const uint2& each : four)
        for (const float number : {low(each.x), high(each.x), low(each.y), high(each.y)}) most = fmaxf(most, fabsf(number));
      for (int apart = 1; apart < 4; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
      unit = power_of_two(most) / 16384;
      const float by = inverse_of_power(unit);
#pragma unroll
      for (uint2& each : four)
        each = {pair(low(each.x) * by, high(each.x) * by), pair(low(each.y) * by, high(each.y) * by)};
    }
#pragma unroll
    for (int step = 0; step < KEY_PIECES * STEPS; step++) pairs[step][0] = four[step].x, pairs[step][1] = four[step].y;
#pragma unroll
    for (int i = 0; i < 2; i++) factor[i] = __shfl_sync(~0u, unit, (2 * fourth + i) * 4, 32) * scale * LOG2_E;
  }
  __device__ __forceinline__ static float low(uint32_t pair) { return number(pair & 0xffff); }
  __device__ __forceinline__ static float high(uint32_t pair) { return number(pair >> 16); }
  __device__ __forceinline__ static float number(uint32_t bits) {
    T half;
    memcpy(&half, &bits, 2);
    return widen(half);
  }
};

// Where 16 bytes of a key or a value lie in a slot.
__device__ __forceinline__ int key_at(int key, int piece) { return (key * PIECES + (piece ^ key % 2 * 4)) * 16; }
__device__ __forceinline__ int value_at(int key, int piece) { return HELD + (key * PIECES + (piece ^ (key & 6))) * 16; }

// A warp's way through its pieces of the text.
struct Stream {
  static constexpr int ROWS = 32 / PIECES;  // that the warp brings at a time
  const Batch& batch;
  unsigned char* ring;
  const Integer* table;
  const unsigned char *key, *value;      // this thread's 16 bytes of a page's first token
  const float *key_scale, *value_scale;  // of the token whose scale is this thread's
  int length, end;

  __device__ Stream(const Batch& batch, unsigned char* ring, const Integer* table, int head, int length, int end)
      : batch(batch), ring(ring), table(table), length(length), end(end) {
    key = batch.keys + head * batch.key.head + row() * batch.key.token + column() * 16;
    value = batch.values + head * batch.value.head + row() * batch.value.token + column() * 16;
    key_scale = batch.key_scale + head * batch.key_scales.head + lane() % KEYS * batch.key_scales.token;
    value_scale = batch.value_scale + head * batch.value_scales.head + lane() % KEYS * batch.value_scales.token;
  }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int row() { return lane() / PIECES; }
  __device__ __forceinline__ static int column() { return lane() % PIECES; }
  __device__ __forceinline__ int64_t page_of(int piece) const {
    return piece < end ? static_cast<int64_t>(__ldg(table + piece * KEYS / PAGE * batch.table_block)) : 0;
  }

  // Send off 16 keys and values; zeros where the text has ended.
  __device__ __forceinline__ void bring(int piece, int slot, int64_t page) const {
    if (piece < end) {
      const int first = piece * KEYS % PAGE, left = length - piece * KEYS;
      unsigned char* to = ring + slot * SLOT;
      const unsigned char* from_key = key + page * batch.key.page + first * batch.key.token;
      const unsigned char* from_value = value + page * batch.value.page + first * batch.value.token;
#pragma unroll
      for (int rows = 0; rows < KEYS; rows += ROWS)
        copy_16(to + key_at(rows + row(), column()), from_key + rows * batch.key.token, rows + row() < left);
#pragma unroll
      for (int rows = 0; rows < KEYS; rows += ROWS)
        copy_16(to + value_at(rows + row(), column()), from_value + rows * batch.value.token, rows + row() < left);
      if (CODES) {
        const float* of_key = key_scale + page * batch.key_scales.page + first * batch.key_scales.token;
        const float* of_value = value_scale + page * batch.value_scales.page + first * batch.value_scales.token;
        copy_4(to + 2 * HELD + lane() * 4, lane() < KEYS ? of_key : of_value, lane() % KEYS < left);
      }
    }
    close_group();
  }
};

// What a warp has seen so far: a thread has two queries' largest and sums, and rows lane / 4 and 8 further of every tile of
// valuesᵀ with these queries.
struct Seen {
  float largest[2], sum[2] = {}, values[TILES][4] = {};
  float unit = CODES ? 0x1p-112f : 1;  // of values: what scales are relative to
  __device__ Seen() { largest[0] = largest[1] = -INFINITY; }

  __device__ __forceinline__ void add(const Stream& stream, const Queries& queries, int piece, int slot) {
    const int lane = threadIdx.x % 32, mine = lane / 4, fourth = lane % 4;
    const unsigned char* held = stream.ring + slot * SLOT;
    const auto piece_at = [&](int at) { return *reinterpret_cast<const uint4*>(held + at); };
    float two[2][4] = {}, scores[4];  // two sums, so that one product need not wait for the other
#pragma unroll
    for (int p = 0; p < KEY_PIECES; p++) {
      const uint4 first = piece_at(key_at(mine, fourth + 4 * p)), second = piece_at(key_at(mine + 8, fourth + 4 * p));
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        if constexpr (CODES) {
          const uint32_t a = word_of(first, step), b = word_of(second, step);
          multiply_add<Operand>(two[step % 2], {halves_of_fp8<Operand>(a & 0xffff), halves_of_fp8<Operand>(b & 0xffff),
                                         halves_of_fp8<Operand>(a >> 16), halves_of_fp8<Operand>(b >> 16)},
                                queries.pairs[p * STEPS + step]);
        } else {
          multiply_add<Operand>(two[step % 2], {word_of(first, 2 * step), word_of(second, 2 * step), word_of(first, 2 * step + 1),
                                         word_of(second, 2 * step + 1)}, queries.pairs[p * STEPS + step]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = two[0][i] + two[1][i];
    float shares[2] = {1, 1};
    if constexpr (CODES) {
      const float* scale = reinterpret_cast<const float*>(held + 2 * HELD);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float of_key = scale[mine + 8 * i];
        scores[2 * i] *= of_key, scores[2 * i + 1] *= of_key;
        shares[i] = scale[KEYS + mine + 8 * i];
      }
      const float most = as_float(__reduce_max_sync(~0u, as_bits(fmaxf(fabsf(shares[0]), fabsf(shares[1])))));
      if (most > NEARLY * unit) {
        const float before = unit;
        unit = power_of_two(most);
        const float fade = before * inverse_of_power(unit);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
          for (int i = 0; i < 4; i++) values[tile][i] *= fade;
      }
      shares[0] *= ROOM * inverse_of_power(unit), shares[1] *= ROOM * inverse_of_power(unit);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool there = piece * KEYS + mine + i / 2 * 8 < stream.length;
      scores[i] = there ? scores[i] * queries.factor[i % 2] : -INFINITY;
    }
    const float high[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
    if (__any_sync(~0u, high[0] > largest[0] + SLACK || high[1] > largest[1] + SLACK)) {
      float fade[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float top = fmaxf(largest[i], largest_of_keys(high[i]));
        fade[i] = exp2f(largest[i] - top), largest[i] = top, sum[i] *= fade[i];
      }
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) values[tile][i] *= fade[i % 2];
    }
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      weights[i] = exp2f(scores[i] - largest[i % 2]);
      sum[i % 2] += weights[i];
      weights[i] *= shares[i / 2];
    }
    const uint32_t right[2] = {turned(pair(weights[0], weights[1])), turned(pair(weights[2], weights[3]))};
#pragma unroll
    for (int p = 0; p < VALUE_PIECES; p++) {
      uint4 of_key[4];
#pragma unroll
      for (int i = 0; i < 4; i++) of_key[i] = piece_at(value_at(2 * fourth + i % 2 + i / 2 * 8, mine + 8 * p));
#pragma unroll
      for (int word = 0; word < 4; word++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = word_of(of_key[i], word);
        if constexpr (CODES) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const uint32_t near = __byte_perm(words[0], words[1], half ? 0x7362 : 0x5140);
            const uint32_t far = __byte_perm(words[2], words[3], half ? 0x7362 : 0x5140);
            multiply_add<Operand>(values[2 * word + half], {halves_of_fp8<Operand>(near & 0xffff), halves_of_fp8<Operand>(near >> 16),
                                            halves_of_fp8<Operand>(far & 0xffff), halves_of_fp8<Operand>(far >> 16)}, right);
          }
        } else {
          multiply_add<Operand>(values[4 * p + word],
                                {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[0], words[1], 0x7632),
                                 __byte_perm(words[2], words[3], 0x5410), __byte_perm(words[2], words[3], 0x7632)}, right);
        }
      }
    }
  }

  // Which element of a value is row lane / 4 of a tile, or 8 further.
  __device__ __forceinline__ static int element(int tile, int further) {
    const int first = threadIdx.x % 32 / 4;
    return CODES ? first * 16 + 2 * tile + further : (first + tile / 4 * 8) * 8 + tile % 4 * 2 + further;
  }
  __device__ __forceinline__ void put(Part& part) {
    sum[0] = sum_of_keys(sum[0]), sum[1] = sum_of_keys(sum[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int query = threadIdx.x % 4 * 2 + i;
      if (query >= GROUP) continue;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int further = 0; further < 2; further++)
          part.values[query * DIM + element(tile, further)] = values[tile][2 * further + i] * (CODES ? unit / ROOM : 1);
      if (threadIdx.x % 32 < 4) part.largest[query] = largest[i], part.sum[query] = sum[i];
    }
  }
};

// One element of several parts together: `values`, `largest` and `sum` answer of the nth.
struct Merged {
  float largest, sum, value;
  template <typename Values, typename Largest, typename Sum>
  __device__ __forceinline__ Merged(int parts, Values values, Largest largest_of, Sum sum_of) : largest(-INFINITY), sum(0), value(0) {
#pragma unroll 8
    for (int n = 0; n < parts; n++) largest = fmaxf(largest, largest_of(n));
#pragma unroll 8
    for (int n = 0; n < parts; n++) {
      const float weight = exp2f(largest_of(n) - largest);
      value = fmaf(weight, values(n), value), sum = fmaf(weight, sum_of(n), sum);
    }
  }
};

__global__ void __launch_bounds__(THREADS) paged_decode_kernel(const __grid_constant__ Batch batch) {
  extern __shared__ __align__(128) unsigned char memory[];
  wait_for_kernels_before();
  const int units = batch.sequences * batch.kv_heads, unit = blockIdx.x % units, split = blockIdx.x / units;
  const int sequence = unit / batch.kv_heads, head = unit % batch.kv_heads, warp = threadIdx.x / 32;
  const int token = static_cast<int>(batch.ends[sequence]), after = static_cast<int>(batch.ends[sequence + 1]);
  const int length = static_cast<int>(batch.lengths[sequence]);
  T* out = batch.out + head * GROUP * DIM;
  const int64_t out_token = static_cast<int64_t>(batch.kv_heads) * GROUP * DIM;
  if (split == 0)  // tokens of no sequence
    for (int64_t padding = batch.ends[batch.sequences] + sequence; padding < batch.tokens; padding += batch.sequences)
      for (int e = threadIdx.x; e < GROUP * DIM; e += THREADS) out[padding * out_token + e] = rounded<T>(0);
  if (token == after) return;

  const int all = (length + KEYS - 1) / KEYS;
  const int span = max((all + batch.splits - 1) / batch.splits, LEAST_PIECES);
  const int used = (all + span - 1) / span;
  if (split >= used) return;
  const int end = min((split + 1) * span, all);
  Stream stream(batch, memory + warp * SLOTS * SLOT, batch.tables + sequence * batch.table_row, head, length, end);
  int piece = split * span + warp;
  int64_t pages[SLOTS];
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) pages[slot] = stream.page_of(piece + slot * WARPS);
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) stream.bring(piece + slot * WARPS, slot, pages[slot]);
  const Queries queries(batch.q + token * batch.q_token + head * GROUP * batch.q_head, batch.q_head, batch.scale);
  Seen seen;
  for (int slot = 0; piece < end; piece += WARPS) {
    const int64_t page = stream.page_of(piece + SLOTS * WARPS);
    wait_for_all_but<SLOTS - 1>();
    __syncwarp();  // what other lanes brought has come too
    seen.add(stream, queries, piece, slot);
    __syncwarp();
    stream.bring(piece + SLOTS * WARPS, slot, page);
    slot = slot == SLOTS - 1 ? 0 : slot + 1;
  }
  wait_for_all_but<0>();
  __syncthreads();  // nobody reads the ring any more
  Part* of_warp = reinterpret_cast<Part*>(memory);
  seen.put(of_warp[warp]);
  __syncthreads();
  float* parts = batch.parts + static_cast<int64_t>(unit) * batch.splits * GROUP * DIM;
  float* sums = batch.sums + static_cast<int64_t>(unit) * batch.splits * GROUP * 2;
  for (int e = threadIdx.x; e < GROUP * DIM; e += THREADS) {
    const int query = e / DIM;
    const Merged merged(WARPS, [&](int n) { return of_warp[n].values[e]; }, [&](int n) { return of_warp[n].largest[query]; },
                        [&](int n) { return of_warp[n].sum[query]; });
    if (used == 1) {
      out[token * out_token + e] = rounded<T>(merged.value / merged.sum);
    } else {
      parts[split * GROUP * DIM + e] = merged.value;
      if (e % DIM == 0) sums[(split * GROUP + query) * 2] = merged.largest, sums[(split * GROUP + query) * 2 + 1] = merged.sum;
    }
  }
  if (used == 1 || !comes_last(batch.counts + unit, used)) return;
  for (int e = threadIdx.x; e < GROUP * DIM; e += THREADS) {
    const int query = e / DIM;
    const Merged merged(used, [&](int n) { return __ldcg(parts + n * GROUP * DIM + e); },
                        [&](int n) { return __ldcg(sums + (n * GROUP + query) * 2); },
                        [&](int n) { return __ldcg(sums + (n * GROUP + query) * 2 + 1); });
    out[token * out_token + e] = rounded<T>(merged.value / merged.sum);
  }
}

EXPORT paged_decode(
    const void* q, const void* keys, const void* values, const void* key_scale, const void* value_scale, const void* tables,
    const void* lengths, const void* ends, void* out, void* parts, void* sums, void* counts, int64_t tokens, int64_t sequences,
    int64_t kv_heads, int64_t splits, int64_t q_token, int64_t q_head, int64_t table_row, int64_t table_block,
    int64_t key_page, int64_t key_token, int64_t key_head, int64_t value_page, int64_t value_token, int64_t value_head,
    int64_t key_scale_page, int64_t key_scale_token, int64_t key_scale_head, int64_t value_scale_page,
    int64_t value_scale_token, int64_t value_scale_head, int64_t early, double scale, cudaStream_t stream) {
  const Batch batch{
      static_cast<const T*>(q), static_cast<const unsigned char*>(keys), static_cast<const unsigned char*>(values),
      static_cast<const float*>(key_scale), static_cast<const float*>(value_scale), static_cast<const Integer*>(tables),
      static_cast<const Integer*>(lengths), static_cast<const Integer*>(ends), static_cast<T*>(out), static_cast<float*>(parts),
      static_cast<float*>(sums), static_cast<unsigned*>(counts), static_cast<int>(tokens), static_cast<int>(sequences),
      static_cast<int>(kv_heads), static_cast<int>(splits), q_token, q_head, table_row, table_block,
      {key_page * SIZE, key_token * SIZE, key_head * SIZE}, {value_page * SIZE, value_token * SIZE, value_head * SIZE},
      {key_scale_page, key_scale_token, key_scale_head}, {value_scale_page, value_scale_token, value_scale_head},
      static_cast<float>(scale)};
  cudaFuncSetAttribute(paged_decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  cudaLaunchAttribute begins_early;
  begins_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  begins_early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(sequences * kv_heads * splits), config.blockDim = THREADS;
  config.dynamicSmemBytes = SHARED_BYTES, config.stream = stream, config.attrs = &begins_early, config.numAttrs = early ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, paged_decode_kernel, batch);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
