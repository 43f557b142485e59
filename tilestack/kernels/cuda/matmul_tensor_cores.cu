// c[m, n] = Σ_k a[m, k] · b[n, k] + bias[n] on tensor cores (sm_80 and up), for float16 and bfloat16, sums in float.
//
//     global ──cp.async──▶ shared, a ring of SLOTS tiles of A and B ──ldmatrix──▶ registers ──mma.sync──▶ sums
//
//     block   128 x 128 of C, 8 warps        a row of a slot is K_TILE elements and 8 of padding: the eight rows that an
//     warp     64 x  32 of C                 ldmatrix reads then lie in different banks
//     mma      16 x   8 of C, 16 of K
//
// While one slot is multiplied, the next SLOTS - 1 are on their way. Blocks go over C in bands of BAND rows of tiles, so
// that those which run at a time share most of what they read. Rows of a and b are K contiguous elements on 16 bytes.
#include "ptx.cuh"

constexpr int M_TILE = 128, N_TILE = 128, K_TILE = 32, PITCH = K_TILE + 8, SLOTS = 4, BAND = 8, THREADS = 256;
constexpr int SLOT = (M_TILE + N_TILE) * PITCH, SHARED_BYTES = SLOTS * SLOT * 2;

// ROWS x K_TILE from (row, k) on, on its way; zeros outside of the matrix.
template <typename T, int ROWS>
__device__ void bring(T* tile, const T* from, int64_t row, int64_t rows, int64_t k, int64_t K) {
  constexpr int VECTORS = K_TILE / 8;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
    const int r = i / VECTORS, d = i % VECTORS * 8;
    const bool inside = row + r < rows && k + d < K;
    copy_16(tile + r * PITCH + d, inside ? from + (row + r) * K + k + d : from, inside);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
matmul_tensor_cores_kernel(const T* a, const T* b, const T* bias, T* c, int64_t M, int64_t N, int64_t K) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* ring = reinterpret_cast<T*>(memory);  // [SLOTS][M_TILE of A, then N_TILE of B][PITCH]
  const int64_t tiles_m = pieces(M, M_TILE), tiles_n = pieces(N, N_TILE);
  const int64_t first = blockIdx.x / (BAND * tiles_n) * BAND, high = min(static_cast<int64_t>(BAND), tiles_m - first);
  const int64_t m = (first + blockIdx.x % (BAND * tiles_n) % high) * M_TILE;
  const int64_t n = blockIdx.x % (BAND * tiles_n) / high * N_TILE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
  const int64_t steps = pieces(K, K_TILE);

  auto bring_step = [&](int64_t step) {
    if (step < steps) {
      T* slot = ring + step % SLOTS * SLOT;
      bring<T, M_TILE>(slot, a, m, M, step * K_TILE, K);
      bring<T, N_TILE>(slot + M_TILE * PITCH, b, n, N, step * K_TILE, K);
    }
    close_group();
  };

  float sum[4][4][4] = {};  // tiles of 16 rows, tiles of 8 columns, and of those this thread's part
  for (int step = 0; step < SLOTS - 1; step++) bring_step(step);
  for (int64_t step = 0; step < steps; step++) {
    wait_for_all_but<SLOTS - 2>();
    __syncthreads();  // this step has come for all threads, and all are done with the one before, whose slot is next
    bring_step(step + SLOTS - 1);
    const T* a_slot = ring + step % SLOTS * SLOT;
    const T* b_slot = a_slot + M_TILE * PITCH;
#pragma unroll
    for (int k = 0; k < K_TILE; k += 16) {
      uint32_t left[4][4], right[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++)
        load_matrices(left[i], a_slot + (warp_m + i * 16 + lane % 16) * PITCH + k + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t both[4];  // of two tiles of 8 columns, k to k + 7 and k + 8 to k + 15 each
        load_matrices(both, b_slot + (warp_n + j * 8 + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
        right[j][0] = both[0], right[j][1] = both[1], right[j + 1][0] = both[2], right[j + 1][1] = both[3];
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_add<T>(sum[i][j], left[i], right[j]);
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int64_t row = m + warp_m + i * 16 + lane / 4 + half * 8, column = n + warp_n + j * 8 + lane % 4 * 2;
        if (row >= M || column >= N) continue;
        const bool pair = column + 1 < N;
        float low = sum[i][j][2 * half], high_one = sum[i][j][2 * half + 1];
        if (bias != nullptr) low += widen(bias[column]), high_one += pair ? widen(bias[column + 1]) : 0.f;
        T* out = c + row * N + column;
        if (N % 2 == 0) {
          *reinterpret_cast<Pack<T, 2>*>(out) = {rounded<T>(low), rounded<T>(high_one)};
        } else {
          out[0] = rounded<T>(low);
          if (pair) out[1] = rounded<T>(high_one);
        }
      }
}

template <typename T>
const char* launch(const void* a, const void* b, const void* bias, void* c, int64_t M, int64_t N, int64_t K, cudaStream_t stream) {
  auto kernel = matmul_tensor_cores_kernel<T>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  kernel<<<static_cast<unsigned>(pieces(M, M_TILE) * pieces(N, N_TILE)), THREADS, SHARED_BYTES, stream>>>(
      static_cast<const T*>(a), static_cast<const T*>(b), static_cast<const T*>(bias), static_cast<T*>(c), M, N, K);
  return launched();
}

EXPORT matmul_tensor_cores(
    const void* a, const void* b, const void* bias, void* c, int64_t M, int64_t N, int64_t K, int64_t dtype,
    cudaStream_t stream) {
  if (dtype == 2) return launch<__half>(a, b, bias, c, M, N, K, stream);
  if (dtype == 3) return launch<__nv_bfloat16>(a, b, bias, c, M, N, K, stream);
  return "tensor cores multiply float16 and bfloat16 here";
}
