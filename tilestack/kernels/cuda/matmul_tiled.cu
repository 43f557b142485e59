// c[m, n] = Σ_k a[m, k] · b[n, k] + bias[n] on plain CUDA cores, in any dtype and with any strides.
//
//                 K                     a block owns a TILE x TILE piece of C and walks along K; at each step its threads
//            +---------+                bring TILE x DEPTH of A and of B into shared memory, each element once for TILE
//       TILE | A →     |   B likewise   uses of it, and a thread multiplies SIDE of A with SIDE of B out of there, so that
//            +---------+                each number it fetches is used SIDE times more from a register
//
// Each step's DEPTH products are added up by themselves, and the steps' sums to each other: two short chains of roundings
// instead of one as long as K.
//
#include "common.cuh"

constexpr int TILE = 64, DEPTH = 16, SIDE = 4, ACROSS = TILE / SIDE, THREADS = ACROSS * ACROSS;

struct Matrix {  // [rows, K]
  const void* data;
  int64_t rows, row_stride, k_stride;
};

// TILE rows and DEPTH columns from (row, k) on, zeros outside of the matrix. Neighbouring threads take neighbouring addresses.
template <typename T>
__device__ void bring(Wide<T> (*tile)[TILE + 1], const Matrix& from, int64_t row, int64_t k, int64_t K) {
  const T* data = static_cast<const T*>(from.data);
  for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
    const int r = from.k_stride == 1 ? i / DEPTH : i % TILE, d = from.k_stride == 1 ? i % DEPTH : i / TILE;
    const bool inside = row + r < from.rows && k + d < K;
    tile[d][r] = inside ? widen(data[(row + r) * from.row_stride + (k + d) * from.k_stride]) : Wide<T>(0);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) matmul_tiled_kernel(Matrix a, Matrix b, const T* bias, T* c, int64_t K) {
  using W = Wide<T>;
  __shared__ W a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1];
  const int64_t tiles_n = pieces(b.rows, TILE), m = blockIdx.x / tiles_n * TILE, n = blockIdx.x % tiles_n * TILE;
  const int my_m = threadIdx.x / ACROSS * SIDE, my_n = threadIdx.x % ACROSS;  // columns my_n, my_n + ACROSS, …
  W sum[SIDE][SIDE] = {};
  for (int64_t k = 0; k < K; k += DEPTH) {
    bring<T>(a_tile, a, m, k, K);
    bring<T>(b_tile, b, n, k, K);
    __syncthreads();
    W of_step[SIDE][SIDE] = {};
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      W left[SIDE], right[SIDE];
#pragma unroll
      for (int i = 0; i < SIDE; i++) left[i] = a_tile[d][my_m + i];
#pragma unroll
      for (int j = 0; j < SIDE; j++) right[j] = b_tile[d][my_n + j * ACROSS];
#pragma unroll
      for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++) of_step[i][j] += left[i] * right[j];
    }
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
      for (int j = 0; j < SIDE; j++) sum[i][j] += of_step[i][j];
    __syncthreads();
  }
  for (int i = 0; i < SIDE; i++)
    for (int j = 0; j < SIDE; j++) {
      const int64_t row = m + my_m + i, column = n + my_n + j * ACROSS;
      if (row < a.rows && column < b.rows)
        c[row * b.rows + column] = rounded<T>(bias == nullptr ? sum[i][j] : sum[i][j] + widen(bias[column]));
    }
}

EXPORT matmul_tiled(
    const void* a, const void* b, const void* bias, void* c, int64_t M, int64_t N, int64_t K, int64_t a_stride_m,
    int64_t a_stride_k, int64_t b_stride_n, int64_t b_stride_k, int64_t dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto of_dtype) {
    using T = decltype(of_dtype);
    matmul_tiled_kernel<T><<<static_cast<unsigned>(pieces(M, TILE) * pieces(N, TILE)), THREADS, 0, stream>>>(
        Matrix{a, M, a_stride_m, a_stride_k}, Matrix{b, N, b_stride_n, b_stride_k}, static_cast<const T*>(bias),
        static_cast<T*>(c), K);
  });
}
