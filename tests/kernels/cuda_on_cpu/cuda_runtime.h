// CUDA on a CPU, for tests: every thread of a grid is a fiber, and they take turns at barriers and shuffles.
//
// Blocks run one after the other, but for a launch with clusters, whose blocks all run together. Copies that are on their way
// arrive only when they are waited for, so that a kernel which waits too little reads what was there before: NaN, at first.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // blocks run one after the other where they have any
#define __align__(bytes) alignas(bytes)

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> T __ldcg(const T* at) { return *at; }
template <typename T> T __ldg(const T* at) { return *at; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  unsigned made = 0;
  for (int byte = 0; byte < 4; byte++) made |= static_cast<unsigned>(both >> (chosen >> 4 * byte & 7) * 8 & 0xff) << 8 * byte;
  return made;
}
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
using std::exp;
inline float max(float a, float b) { return std::fmax(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
template <typename T> T min(T a, T b) { return b < a ? b : a; }

namespace on_cpu {
struct Barrier {
  int waiting = 0, turn = 0;
};
using Copy = std::pair<void*, const void*>;  // of 16 bytes, of zeros where there is no source

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int block, thread;
  bool done = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Grid {
  int blocks, threads, cluster, shared_bytes;
  std::vector<Barrier> of_block, of_cluster, of_warp;
  std::vector<std::vector<double>> of_lanes;  // what the lanes of a warp show each other
  std::vector<std::vector<uint32_t>> of_matrices;
  std::vector<unsigned char*> shared;
  std::map<void*, std::deque<std::pair<void*, std::vector<unsigned char>>>> coming;  // by barrier
};
inline Fiber* now;
inline Grid* grid;
inline ucontext_t home;
inline const std::function<void()>* kernel;

inline void give_way() { swapcontext(&now->context, &home); }
inline void meet(Barrier& barrier, int count) {
  const int turn = barrier.turn;
  if (++barrier.waiting == count) {
    barrier.waiting = 0, barrier.turn++;
  } else {
    while (barrier.turn == turn) give_way();
  }
}
inline int warp() { return now->block * ((grid->threads + 31) / 32) + now->thread / 32; }
inline int lane() { return now->thread % 32; }
inline void meet_warp() { meet(grid->of_warp[warp()], 32); }

inline void enter() {
  (*kernel)();
  now->done = true;
  give_way();
}

// Runs the blocks from `first` on together, in another order each round.
inline void run_blocks(int first, int count) {
  constexpr int STACK = 1 << 16;
  std::vector<Fiber> fibers(static_cast<size_t>(count) * grid->threads);
  std::vector<Fiber*> order;
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.block = first + static_cast<int>(i) / grid->threads, fiber.thread = static_cast<int>(i) % grid->threads;
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK, fiber.context.uc_link = &home;
    makecontext(&fiber.context, enter, 0);
    order.push_back(&fiber);
  }
  for (size_t left = fibers.size(); left > 0;) {
    for (Fiber* fiber : order) {
      if (fiber->done) continue;
      now = fiber;
      swapcontext(&home, &fiber->context);
      left -= fiber->done;
    }
    std::rotate(order.begin(), order.begin() + 37 % order.size(), order.end());
  }
}

inline void run(int blocks, int threads, int cluster, int shared_bytes, const std::function<void()>& body) {
  const int warps = (threads + 31) / 32;
  Grid made{blocks, threads, cluster, shared_bytes};
  made.of_block.resize(blocks), made.of_cluster.resize(blocks), made.of_warp.resize(blocks * warps);
  made.of_lanes.assign(blocks * warps, std::vector<double>(32));
  made.of_matrices.assign(blocks * warps, std::vector<uint32_t>(32 * 4));
  for (int block = 0; block < blocks; block++) {
    void* memory = aligned_alloc(128, (shared_bytes + 127) / 128 * 128 + 128);
    memset(memory, 0xff, shared_bytes);
    made.shared.push_back(static_cast<unsigned char*>(memory));
  }
  grid = &made, kernel = &body;
  if (cluster > 0) run_blocks(0, blocks);
  else for (int block = 0; block < blocks; block++) run_blocks(block, 1);
  for (unsigned char* memory : made.shared) free(memory);
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, int64_t blocks, int threads, int shared_bytes, Arguments... arguments) {
  run(static_cast<int>(blocks), threads, 0, shared_bytes, [&] { kernel(arguments...); });
}
}  // namespace on_cpu

template <typename Read> struct Index {  // whose `x` is what `Read` finds
  struct { operator unsigned() const { return Read{}(); } } x;
};
struct ReadThread { unsigned operator()() const { return on_cpu::now->thread; } };
struct ReadBlock { unsigned operator()() const { return on_cpu::now->block; } };
struct ReadThreads { unsigned operator()() const { return on_cpu::grid->threads; } };
struct ReadBlocks { unsigned operator()() const { return on_cpu::grid->blocks; } };
inline Index<ReadThread> threadIdx;
inline Index<ReadBlock> blockIdx;
inline Index<ReadThreads> blockDim;
inline Index<ReadBlocks> gridDim;

inline void __syncthreads() { on_cpu::meet(on_cpu::grid->of_block[on_cpu::now->block], on_cpu::grid->threads); }
inline void __syncwarp() { on_cpu::meet_warp(); }
template <typename T> T shown_by(int lane, T value) {
  auto& lanes = on_cpu::grid->of_lanes[on_cpu::warp()];
  lanes[on_cpu::lane()] = value;
  on_cpu::meet_warp();
  const T other = static_cast<T>(lanes[lane]);
  on_cpu::meet_warp();
  return other;
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int apart) { return shown_by(on_cpu::lane() ^ apart, value); }
template <typename T> T __shfl_sync(unsigned, T value, int lane, int width) {
  return shown_by(on_cpu::lane() / width * width + lane, value);
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
enum { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeCooperative };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) { return memset(at, value, bytes), cudaSuccess; }
struct cudaLaunchAttribute {
  int id;
  struct { struct { unsigned x, y, z; } clusterDim; int cooperative; } val;
};
struct cudaLaunchConfig_t {
  unsigned gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <typename Kernel> cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* config) {
  *clusters = config->gridDim / config->attrs[0].val.clusterDim.x;
  return cudaSuccess;
}
template <typename Kernel, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, Arguments... arguments) {
  on_cpu::run(config->gridDim, config->blockDim, config->attrs[0].val.clusterDim.x, static_cast<int>(config->dynamicSmemBytes),
              [&] { kernel(arguments...); });
  return cudaSuccess;
}
