// out[row, c] = exp(x[row, c] - top) / sum, a block to a row.
//
//     pass 1    each thread keeps the largest score it has seen and the sum of exp(x - largest), rescaled when a larger
//               one comes; then the block merges what its threads have:  (m, s) + (m', s') = (M, s e^(m-M) + s' e^(m'-M))
//     pass 2    reads the row again, which is still in the cache, and writes
//
// A row with NaN or +inf in it, or with nothing but -inf, has no distribution and comes out as NaN, as in the definition.
#include "common.cuh"

template <typename W> struct Normaliser {
  W largest, sum;
};
template <typename W> __device__ Normaliser<W> from_lane(Normaliser<W> x, int apart) {
  return {from_lane(x.largest, apart), from_lane(x.sum, apart)};
}

// exp(x - top), where nothing has been seen yet if top is -inf
template <typename W> __device__ W above(W x, W top) { return exp(x - (top == -INFINITY ? W(0) : top)); }

struct MergeNormalisers {
  template <typename W> __device__ Normaliser<W> operator()(Normaliser<W> a, Normaliser<W> b) const {
    const W top = max(a.largest, b.largest);
    return {top, a.sum * above(a.largest, top) + b.sum * above(b.largest, top)};
  }
};

template <typename T, int N>
__global__ void softmax_kernel(const T* x, T* out, int64_t columns) {  // x, out: [rows, columns]
  using W = Wide<T>;
  x += blockIdx.x * columns;
  out += blockIdx.x * columns;
  Normaliser<W> seen{-INFINITY, 0};
  for (int64_t c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
    const auto scores = *reinterpret_cast<const Pack<T, N>*>(x + c);
    W top = seen.largest;
#pragma unroll
    for (int j = 0; j < N; j++) top = max(top, widen(scores.at[j]));
    seen.sum *= above(seen.largest, top);
#pragma unroll
    for (int j = 0; j < N; j++) seen.sum += above(widen(scores.at[j]), top);
    seen.largest = top;
  }
  const Normaliser<W> row = over_block(seen, Normaliser<W>{-INFINITY, 0}, MergeNormalisers{});
  for (int64_t c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
    const auto scores = *reinterpret_cast<const Pack<T, N>*>(x + c);
    Pack<T, N> share;
#pragma unroll
    for (int j = 0; j < N; j++) share.at[j] = rounded<T>(exp(widen(scores.at[j]) - row.largest) / row.sum);
    *reinterpret_cast<Pack<T, N>*>(out + c) = share;
  }
}

EXPORT softmax(const void* x, void* out, int64_t rows, int64_t columns, int64_t dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto of_dtype) {
    using T = decltype(of_dtype);
    const bool vectors = columns % VECTOR<T> == 0 && on_16_bytes(x) && on_16_bytes(out);
    auto kernel = vectors ? softmax_kernel<T, VECTOR<T>> : softmax_kernel<T, 1>;
    const int threads = threads_for(columns / (vectors ? VECTOR<T> : 1));
    kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(static_cast<const T*>(x), static_cast<T*>(out), columns);
  });
}
