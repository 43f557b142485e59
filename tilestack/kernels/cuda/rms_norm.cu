// out[row, c] = x[row, c] / rms(x[row]) * weight[c], a block to a row: one pass adds up the squares, a second, for which the
// row is still in the cache, scales it.
#include "common.cuh"

struct Sum {
  template <typename W> __device__ W operator()(W a, W b) const { return a + b; }
};

template <typename T, int N>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* out, int64_t columns, double eps) {
  using W = Wide<T>;  // x, out: [rows, columns]; weight: [columns] or null
  x += blockIdx.x * columns;
  out += blockIdx.x * columns;
  W squares = 0;
  for (int64_t c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
    const auto part = *reinterpret_cast<const Pack<T, N>*>(x + c);
#pragma unroll
    for (int j = 0; j < N; j++) squares += widen(part.at[j]) * widen(part.at[j]);
  }
  const W scale = rsqrt(over_block(squares, W(0), Sum{}) / W(columns) + W(eps));
  for (int64_t c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
    const auto part = *reinterpret_cast<const Pack<T, N>*>(x + c);
    Pack<T, N> normal;
    if (weight == nullptr) {
#pragma unroll
      for (int j = 0; j < N; j++) normal.at[j] = rounded<T>(widen(part.at[j]) * scale);
    } else {
      const auto w = *reinterpret_cast<const Pack<T, N>*>(weight + c);
#pragma unroll
      for (int j = 0; j < N; j++) normal.at[j] = rounded<T>(widen(part.at[j]) * scale * widen(w.at[j]));
    }
    *reinterpret_cast<Pack<T, N>*>(out + c) = normal;
  }
}

EXPORT rms_norm(
    const void* x, const void* weight, void* out, int64_t rows, int64_t columns, double eps, int64_t dtype,
    cudaStream_t stream) {
  return with_dtype(dtype, [&](auto of_dtype) {
    using T = decltype(of_dtype);
    const bool vectors = columns % VECTOR<T> == 0 && on_16_bytes(x) && on_16_bytes(weight) && on_16_bytes(out);
    auto kernel = vectors ? rms_norm_kernel<T, VECTOR<T>> : rms_norm_kernel<T, 1>;
    const int threads = threads_for(columns / (vectors ? VECTOR<T> : 1));
    kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out), columns, eps);
  });
}
