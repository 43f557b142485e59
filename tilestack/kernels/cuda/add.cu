// out[i] = x[i] + y[i]. A thread takes 16 bytes of x and of y at a time, so that each instruction moves as much as it can:
//
//     thread     0        1        2             consecutive threads, consecutive addresses: a warp reads 512 bytes
//     x      |........|........|........| …      in one piece, and the grid walks on until the end
#include "common.cuh"

template <typename T, int N>
__global__ void add_kernel(const T* x, const T* y, T* out, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * N;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < count; i += stride) {
    if (i + N <= count) {
      const auto a = *reinterpret_cast<const Pack<T, N>*>(x + i), b = *reinterpret_cast<const Pack<T, N>*>(y + i);
      Pack<T, N> sum;
#pragma unroll
      for (int j = 0; j < N; j++) sum.at[j] = rounded<T>(widen(a.at[j]) + widen(b.at[j]));
      *reinterpret_cast<Pack<T, N>*>(out + i) = sum;
    } else {
      for (int64_t j = i; j < count; j++) out[j] = rounded<T>(widen(x[j]) + widen(y[j]));
    }
  }
}

EXPORT add(const void* x, const void* y, void* out, int64_t count, int64_t dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto of_dtype) {
    using T = decltype(of_dtype);
    constexpr int THREADS = 256, BLOCKS = 1 << 14;  // beyond that many, a block takes several turns
    const bool vectors = on_16_bytes(x) && on_16_bytes(y) && on_16_bytes(out);
    const int64_t wanted = pieces(count, static_cast<int64_t>(THREADS) * (vectors ? VECTOR<T> : 1));
    const int blocks = static_cast<int>(wanted < BLOCKS ? wanted : BLOCKS);
    auto kernel = vectors ? add_kernel<T, VECTOR<T>> : add_kernel<T, 1>;
    kernel<<<blocks, THREADS, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out), count);
  });
}
