// out[m, n] = Σ_group scale[n, group] · Σ_{k in group} x[m, k] · (code[n, k] - zero[n, group]) + bias[n], 1 to 16 rows of x.
//
// The time is that of reading the weight, so all that counts is that the memory never waits. The weight is the left operand
// of the tensor cores and x the right one, whose columns come in eights: up to 8 rows of x cost one product, not a tile of 16.
//
//     stage    32 rows of the weight, 4 pieces of each; a piece is 16 bytes of a row, 32 codes of 4 bits or 16 of 8
//     warp     32 rows, some stages of K, which come through a ring of its own, SLOTS ahead, by cp.async
//     block    row_warps x k_warps warps; x and the scales for its part of K lie in shared memory
//     cluster  `splits` blocks that share K; sums of a tile are added through its shared memory, in one order
//
// Codes change places neither in memory nor between threads. ldmatrix hands byte 4 t + i of a piece to thread t of four, as
// byte i of a word; its even and its odd bytes are two pairs of halves. The sum along K does not care for its order, so x is
// laid out likewise, of 16 neighbours the even ones first and then the odd ones:
//
//     word of thread t     4t | 4t+1 | 4t+2 | 4t+3       codes of 4 bits: the low halves of a word are one step along K, the
//     left operand, k =    (4t, 4t+2), (4t+1, 4t+3)      high ones, 16 neighbours further, the next
//     x in shared memory   0 2 4 6 8 10 12 14   1 3 5 7 9 11 13 15
//
// A code less its zero point is a small integer, and one in fp8 has four digits: halves hold both exactly. Sums of FOLD pieces,
// which lie in one group, are scaled in float. Nothing is rounded but sums.
//
// As macros: CODES, the format of the weight, and FOLD, 1, 2 or 4.
#include <cooperative_groups.h>

#include "ptx.cuh"

namespace cg = cooperative_groups;

constexpr int INT4 = 0, INT8 = 1, FP8 = 2;
constexpr int ROWS = 32, PIECES = 4, SLOTS = 4, STAGE_BYTES = ROWS * PIECES * 16;
constexpr int MOST_THREADS = 512, MOST_SPLITS = 8;
constexpr int STEPS = CODES == INT4 ? 2 : 1, PIECE_CODES = 16 * STEPS, STAGE_CODES = PIECES * PIECE_CODES;
constexpr int SUMS_APART = ROWS + 4;  // floats from one row of x to the next, in other banks
static_assert(CODES == INT4 || CODES == INT8 || CODES == FP8, "formats of codes");
static_assert(PIECES % FOLD == 0, "a stage is whole sums of pieces");

struct Sizes {
  int64_t N, K;
  int M, groups, group_pieces;  // where there is one group, whole stages of them
  int row_warps, k_warps, splits;
  int stages;         // of a warp
  int ring_bytes;     // of a warp, with room for its sums
  int groups_nearby;  // those that a block's part of K may meet
  int scale_dtype, bias_dtype;
};

// What makes a code a half. GPUs convert integers slowly, so a code becomes the last bits of a number, BASE, whose steps there
// are even, and BASE is subtracted with the zero point. A step is one in float16. In the high half of a byte a code counts for
// 16 times as much: 1024 + 16 · code, times a sixteenth. In bfloat16, with seven bits, that is one too many, except among the
// smallest numbers there are: below 2^-125 all steps are 2^-133, and 16 of them times 2^127 are a quarter. So a step is that.
template <typename T> struct Way;
template <> struct Way<__nv_bfloat16> {
  static constexpr float STEP = CODES == INT4 ? 0.25f : 1, BASE = CODES == INT4 ? 32 : 0;
  static constexpr uint32_t LOW = 0x42004200, HIGH = 0;
  static constexpr float HIGH_BASE = 0, HIGH_FACTOR = 0x1p127f;
};
template <> struct Way<__half> {
  static constexpr float STEP = 1, BASE = CODES == INT4 ? 1024 : 1024 + 128;
  static constexpr uint32_t LOW = 0x64006400, HIGH = 0x64006400;
  static constexpr float HIGH_BASE = 64, HIGH_FACTOR = 1.f / 16;
};

// Two halves in a word, both the same number.
template <typename T> __device__ uint32_t twice(float number) {
  const T half = rounded<T>(number);
  return *reinterpret_cast<const uint16_t*>(&half) * 0x10001u;
}
template <typename T> __device__ uint32_t offset_of(int zero) { return twice<T>(Way<T>::BASE + Way<T>::STEP * zero); }

// The codes of a word less their zero point, in steps: for each product along K those of the even and those of the odd bytes.
template <typename T> __device__ void numbers_of(uint32_t word, uint32_t offset, uint32_t (&numbers)[STEPS][2]) {
  if constexpr (CODES == FP8) {
    const uint32_t even_first = __byte_perm(word, 0, 0x3120);
    numbers[0][0] = halves_of_fp8<T>(even_first & 0xffff), numbers[0][1] = halves_of_fp8<T>(even_first >> 16);
  } else {
#pragma unroll
    for (int odd = 0; odd < 2; odd++, word >>= 8) {
      if constexpr (CODES == INT4) {
        const uint32_t high_offset = subtract_pairs<T>(twice<T>(Way<T>::BASE - Way<T>::HIGH_BASE), offset);
        const uint32_t high = masked_xor(word, 0x00f000f0, Way<T>::HIGH);
        numbers[0][odd] = subtract_pairs<T>(masked_xor(word, 0x000f000f, Way<T>::LOW), offset);
        numbers[STEPS - 1][odd] = multiply_add_pairs<T>(high, twice<T>(Way<T>::HIGH_FACTOR), high_offset);
      } else if constexpr (Way<T>::BASE > 0) {
        numbers[0][odd] = subtract_pairs<T>(masked_xor(word, 0x00ff00ff, 0x64806480), offset);  // 1024 + 128 + code
      } else {  // 128 and seven bits, less 128 or, with the sign's bit, 256
        const uint32_t low = masked_xor(word, 0x007f007f, 0x43004300), sign = masked_xor(word, 0x00800080, 0x43004300);
        numbers[0][odd] = subtract_pairs<T>(subtract_pairs<T>(low, sign), offset);
      }
    }
  }
}

// Numbers in one of the dtypes that Python numbers so (build.py), as `run` takes them.
template <typename Run> __device__ void with_numbers(const void* numbers, int dtype, Run run) {
  if (dtype == 0) run(static_cast<const float*>(numbers));
  if (dtype == 2) run(static_cast<const __half*>(numbers));
  if (dtype == 3) run(static_cast<const __nv_bfloat16*>(numbers));
}

// 16 neighbours of x, the even ones first.
__device__ inline void put_even_first(uint4* neighbours) {
  const uint4 a = neighbours[0], b = neighbours[1];
  auto even = [](uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x5410); };
  auto odd = [](uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); };
  neighbours[0] = {even(a.x, a.y), even(a.z, a.w), even(b.x, b.y), even(b.z, b.w)};
  neighbours[1] = {odd(a.x, a.y), odd(a.z, a.w), odd(b.x, b.y), odd(b.z, b.w)};
}

// Where this lane's row of the matrices lies that `load_x` loads of a tile, at k = 0. Rows of x beyond the last have sums that
// nobody looks at: they are the last once more.
template <typename T> __device__ const T* x_of_lane(const T* x, int tile, int M, int pitch) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int row = CODES == INT4 ? tile * 8 + lane % 8 : matrix / 2 * 8 + lane % 8;
  return x + min(row, M - 1) * pitch + (CODES == INT4 ? matrix : matrix % 2) * 8;
}
// The right operand for a piece: four matrices are two products for a tile of 8 rows, or one for two such tiles.
template <typename T, int TILES>
__device__ void load_x(uint32_t (&right)[TILES][STEPS][2], const T* const (&x)[TILES], int k) {
#pragma unroll
  for (int tile = 0; tile < (CODES == INT4 ? TILES : 1); tile++) {
    uint32_t found[4];
    load_matrices(found, x[tile] + k);
    right[tile][0][0] = found[0], right[tile][0][1] = found[1];
    if constexpr (CODES == INT4) right[tile][STEPS - 1][0] = found[2], right[tile][STEPS - 1][1] = found[3];
    else if constexpr (TILES == 2) right[1][0][0] = found[2], right[1][0][1] = found[3];
  }
}

template <typename T, int TILES>
__global__ void __launch_bounds__(MOST_THREADS, 1)
weight_only_kernel(
    const T* x, const unsigned char* weight, const void* scale, const int8_t* zero, const void* bias, T* out, Sizes sizes) {
  extern __shared__ __align__(16) unsigned char memory[];
  const cg::cluster_group cluster = cg::this_cluster();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster.block_rank();
  const int row_warp = warp % sizes.row_warps, k_warp = warp / sizes.row_warps, rows = ROWS * sizes.row_warps;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / sizes.splits) * rows;
  const int pieces = static_cast<int>(sizes.K / PIECE_CODES), all_stages = (pieces + PIECES - 1) / PIECES;
  const int block_first = rank * sizes.k_warps * sizes.stages, columns = sizes.k_warps * sizes.stages * STAGE_CODES;
  const int first = min(block_first + k_warp * sizes.stages, all_stages), end = min(first + sizes.stages, all_stages);
  const int first_group = block_first * PIECES / sizes.group_pieces;

  unsigned char* ring = memory + warp * sizes.ring_bytes;
  T* x_here = reinterpret_cast<T*>(memory + sizes.row_warps * sizes.k_warps * sizes.ring_bytes);  // [M][x_pitch]
  const int x_pitch = columns + 8;  // so that rows begin in different banks
  float2* scales = reinterpret_cast<float2*>(x_here + sizes.M * x_pitch);         // [groups_nearby][rows], with offsets
  float* biases = reinterpret_cast<float*>(scales + sizes.groups_nearby * rows);  // [rows]

  // Lanes bring rows 8 i + lane / 4, beyond the last of the weight that one; of 128 bytes of shared memory and the next, which
  // are two rows each, equal pieces lie in different banks.
  const unsigned char* from[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = min(first_row + row_warp * ROWS + 8 * i + lane / 4, sizes.N - 1);
    from[i] = weight + (row * pieces + first * PIECES + lane % 4) * 16;
  }
  unsigned char* to = ring + lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16;
  int brought = first;
  auto bring_next = [&] {
    if (brought < end) {
      const bool inside = brought * PIECES + lane % 4 < pieces;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        copy_16(to + (brought - first) % SLOTS * STAGE_BYTES + i * 512, from[i], inside);
        from[i] += PIECES * 16;
      }
    }
    brought++;
    close_group();
  };
  const int team = blockDim.x / sizes.M, x_row = threadIdx.x / team;  // threads that bring a row of x
  auto sixteens_of_x = [&](auto run) {                                // this thread's
    if (x_row >= sizes.M) return;
    for (int column = threadIdx.x % team * 16; column < columns; column += team * 16)
      run(column, x_here + x_row * x_pitch + column);
  };
  bring_next();  // the memory has something to do first of all
  sixteens_of_x([&](int column, T* to) {
    const int64_t k = static_cast<int64_t>(block_first) * STAGE_CODES + column;
    const T* from = x + x_row * sizes.K + k;
    copy_16(to, from, k < sizes.K), copy_16(to + 8, from + 8, k < sizes.K);
  });
  close_group();
#pragma unroll
  for (int i = 1; i < SLOTS; i++) bring_next();

  const int row = row_warp * ROWS + lane;  // of the block, one to a thread of those that share K
  const int64_t row_inside = min(first_row + row, sizes.N - 1);
  with_numbers(scale, sizes.scale_dtype, [&](const auto* numbers) {
#pragma unroll 4
    for (int nearby = k_warp; nearby < sizes.groups_nearby; nearby += sizes.k_warps) {
      const int64_t at = row_inside * sizes.groups + first_group + nearby;
      const bool inside = first_group + nearby < sizes.groups;
      const float step = inside ? widen(numbers[at]) / Way<T>::STEP : 0;
      const uint32_t offset = offset_of<T>(zero == nullptr ? (CODES == INT4 ? 8 : 0) : inside ? zero[at] : 0);
      scales[nearby * rows + row] = {step, *reinterpret_cast<const float*>(&offset)};
    }
  });
  if (k_warp == 0)
    with_numbers(bias, sizes.bias_dtype, [&](const auto* numbers) {
      biases[row] = numbers == nullptr ? 0 : widen(numbers[row_inside]);
    });
  wait_for_all_but<SLOTS - 1>();  // for what this thread has brought of x
  sixteens_of_x([&](int, T* there) { put_even_first(reinterpret_cast<uint4*>(there)); });
  __syncthreads();

  const T* x_lane[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    x_lane[tile] = x_of_lane(x_here, tile, sizes.M, x_pitch) + (first - block_first) * STAGE_CODES;
  const int group = first * PIECES / sizes.group_pieces;
  int pieces_left = sizes.group_pieces - first * PIECES % sizes.group_pieces;  // in this group
  const float2* scale_lane = scales + (group - first_group) * rows + row_warp * ROWS + lane / 4;
  float total[2][TILES][4] = {};  // of 16 rows of the weight and 8 of x, this thread's part
  for (int stage = 0; stage < end - first; stage++) {
    wait_for_all_but<SLOTS - 1>();
    __syncwarp();
    const unsigned char* slot = ring + stage % SLOTS * STAGE_BYTES + lane * 64;
#pragma unroll
    for (int fold = 0; fold < PIECES; fold += FOLD) {
      float2 own[4];  // of rows 8 i + lane / 4: a scale and an offset
#pragma unroll
      for (int i = 0; i < 4; i++) own[i] = scale_lane[8 * i];
      float part[2][TILES][4] = {};
#pragma unroll
      for (int piece = fold; piece < fold + FOLD; piece++) {
        uint32_t words[4], left[2][STEPS][4], right[TILES][STEPS][2];
        load_matrices(words, slot + (piece ^ lane / 2 % 4) * 16);
        load_x<T, TILES>(right, x_lane, stage * STAGE_CODES + piece * PIECE_CODES);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t numbers[STEPS][2];
          numbers_of<T>(words[i], *reinterpret_cast<const uint32_t*>(&own[i].y), numbers);
#pragma unroll
          for (int step = 0; step < STEPS; step++)
            left[i / 2][step][i % 2] = numbers[step][0], left[i / 2][step][i % 2 + 2] = numbers[step][1];
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) multiply_add<T>(part[half][tile], left[half][step], right[tile][step]);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
          for (int j = 0; j < 4; j++) total[half][tile][j] += own[2 * half + j / 2].x * part[half][tile][j];
      pieces_left -= FOLD;
      if (pieces_left == 0) scale_lane += rows, pieces_left = sizes.group_pieces;
    }
    __syncwarp();  // all lanes have read the slot
    bring_next();
  }

  float* sums = reinterpret_cast<float*>(ring);  // [rows of x][SUMS_APART], in the place of the weight
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        sums[(tile * 8 + lane % 4 * 2 + j % 2) * SUMS_APART + half * 16 + j / 2 * 8 + lane / 4] = total[half][tile][j];
  __syncthreads();
  // The sum of a block for a row of the weight and one of x takes the place of its first warp's.
  for (int m = k_warp; m < sizes.M; m += sizes.k_warps) {
    float* parts = reinterpret_cast<float*>(memory + row_warp * sizes.ring_bytes) + m * SUMS_APART + lane;
    const int apart = sizes.row_warps * sizes.ring_bytes / 4;
    float sum = parts[0];
#pragma unroll 4
    for (int k = 1; k < sizes.k_warps; k++) sum += parts[k * apart];
    parts[0] = sum;
  }
  cluster.sync();
  for (int m = rank * sizes.k_warps + k_warp; m < sizes.M; m += sizes.splits * sizes.k_warps) {
    float* block_sum = reinterpret_cast<float*>(memory + row_warp * sizes.ring_bytes) + m * SUMS_APART + lane;
    float sum = biases[row], parts[MOST_SPLITS];
#pragma unroll
    for (int split = 0; split < MOST_SPLITS; split++)
      parts[split] = split < sizes.splits ? *cluster.map_shared_rank(block_sum, split) : 0;
#pragma unroll
    for (int split = 0; split < MOST_SPLITS; split++) sum += parts[split];
    if (first_row + row < sizes.N) out[m * sizes.N + first_row + row] = rounded<T>(sum);
  }
  cluster.sync();  // nobody leaves while others read its sums
}

template <typename T, int TILES>
const char* launch(
    const void* x, const void* weight, const void* scale, const void* zero, const void* bias, void* out, const Sizes& sizes,
    int64_t shared_bytes, cudaStream_t stream) {
  auto kernel = weight_only_kernel<T, TILES>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = sizes.splits, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(pieces(sizes.N, ROWS * sizes.row_warps) * sizes.splits);
  config.blockDim = 32 * sizes.row_warps * sizes.k_warps;
  config.dynamicSmemBytes = shared_bytes, config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  cudaError_t error = cudaLaunchKernelEx(
      &config, kernel, static_cast<const T*>(x), static_cast<const unsigned char*>(weight), scale,
      static_cast<const int8_t*>(zero), bias, static_cast<T*>(out), sizes);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

EXPORT weight_only(
    const void* x, const void* weight, const void* scale, const void* zero, const void* bias, void* out, int64_t M, int64_t N,
    int64_t K, int64_t groups, int64_t group_pieces, int64_t row_warps, int64_t k_warps, int64_t splits, int64_t stages,
    int64_t ring_bytes, int64_t groups_nearby, int64_t shared_bytes, int64_t dtype, int64_t scale_dtype, int64_t bias_dtype,
    cudaStream_t stream) {
  auto number = [](int64_t wide) { return static_cast<int>(wide); };
  const Sizes sizes{
      N, K, number(M), number(groups), number(group_pieces), number(row_warps), number(k_warps), number(splits), number(stages),
      number(ring_bytes), number(groups_nearby), number(scale_dtype), number(bias_dtype)};
  auto run = [&](auto one, auto two) {
    return (M <= 8 ? one : two)(x, weight, scale, zero, bias, out, sizes, shared_bytes, stream);
  };
  if (dtype == 2) return run(launch<__half, 1>, launch<__half, 2>);
  if (dtype == 3) return run(launch<__nv_bfloat16, 1>, launch<__nv_bfloat16, 2>);
  return "x is float16 or bfloat16 here";
}
