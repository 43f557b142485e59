// What every kernel here shares: dtypes and what sums of them are kept in, 16-byte vectors, and sums over a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// Functions that Python calls return null, or what went wrong in CUDA's own words.
#define EXPORT extern "C" __attribute__((visibility("default"))) const char*
inline const char* launched() {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// At least float: halves are computed in float, double stays double.
template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ inline T rounded(Wide<T> x) { return x; }
template <> __device__ inline __half rounded<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Calls `run` with a value of the dtype that Python numbers so (build.py).
template <typename Run> const char* with_dtype(int64_t dtype, Run run) {
  switch (dtype) {
    case 0: run(float{}); break;
    case 1: run(double{}); break;
    case 2: run(__half{}); break;
    case 3: run(__nv_bfloat16{}); break;
    default: return "an unknown dtype";
  }
  return launched();
}

// N elements that are loaded and stored with one instruction.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

inline bool on_16_bytes(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }
__host__ __device__ inline int64_t pieces(int64_t number, int64_t size) { return (number + size - 1) / size; }

// Threads for a row: whole warps, no more than there are elements for, at most 1024.
inline int threads_for(int64_t elements) {
  int64_t warps = pieces(elements, 32);
  return 32 * static_cast<int>(warps < 1 ? 1 : warps > 32 ? 32 : warps);
}

__device__ inline float from_lane(float x, int apart) { return __shfl_xor_sync(~0u, x, apart); }
__device__ inline double from_lane(double x, int apart) { return __shfl_xor_sync(~0u, x, apart); }

// All values of a block merged, in every thread of it: over each warp, then over what the warps came to.
template <typename Value, typename Merge> __device__ Value over_block(Value value, Value nothing, Merge merge) {
  __shared__ Value of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int apart = 16; apart > 0; apart /= 2) value = merge(value, from_lane(value, apart));
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? of_warp[lane] : nothing;
  for (int apart = 16; apart > 0; apart /= 2) value = merge(value, from_lane(value, apart));
  return value;
}
