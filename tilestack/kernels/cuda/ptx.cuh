// The instructions that CUDA C++ has no words for, each as a function; nothing else here is written in PTX.
#pragma once
#include "common.cuh"

__device__ inline uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// 16 bytes from global to shared memory, on their way from now on; without `there`, 16 zeros.
__device__ inline void copy_16(void* to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0) : "memory");
}
__device__ inline void copy_4(void* to, const void* from, bool there = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
}
// The same, and the way to read it, for memory that is touched in no other way: in order among themselves, and nothing else
// has to wait for them.
__device__ inline void copy_16_aside(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
__device__ inline uint4 load_16_aside(const void* from) {
  uint4 to;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "r"(shared_address(from)));
  return to;
}
template <int N> __device__ inline void wait_aside_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ inline void close_group_aside() { asm volatile("cp.async.commit_group;"); }
// 128 bytes or less of a line, no further than the L2.
__device__ inline void fetch_to_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
// What was sent off since the last call is a group, also where that is nothing; a thread waits for all but its last N groups.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Has what a word is made of computed ahead of all that follows: arithmetic is moved behind a wait otherwise, to where it is
// used. (The word must never be this one.)
__device__ inline void compute_here(uint32_t word) {
  asm volatile("{ .reg .pred never; setp.eq.u32 never, %0, 0x0f0f0f0f; @never trap; }" ::"r"(word));
}

// Four 8 x 8 matrices of halves for tensor cores; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// An 8 x 8 matrix of halves, of which a thread has two neighbours of row lane / 4: the same of its columns.
__device__ inline uint32_t turned(uint32_t pair) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
  return found;
}

// c += a b on tensor cores: a is 16 x 16, b 16 x 8, c 16 x 8 in float, spread over a warp.
template <typename T> __device__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> __device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ inline void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two codes of float8_e4m3fn, the first in the low byte, as halves, which hold them exactly.
template <typename T> __device__ uint32_t halves_of_fp8(uint32_t codes);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// a - b and a b + c of two halves in a word each.
template <typename T> __device__ uint32_t subtract_pairs(uint32_t a, uint32_t b);
template <> __device__ inline uint32_t subtract_pairs<__nv_bfloat16>(uint32_t a, uint32_t b) {
  asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <> __device__ inline uint32_t subtract_pairs<__half>(uint32_t a, uint32_t b) {
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <typename T> __device__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c);
template <> __device__ inline uint32_t multiply_add_pairs<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  return a;
}
template <> __device__ inline uint32_t multiply_add_pairs<__half>(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  return a;
}
// (word & mask) ^ bits in one instruction, of which the compiler would make two.
__device__ inline uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t bits) {
  asm("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(word) : "r"(mask), "r"(bits));
  return word;
}

template <> __device__ inline uint32_t halves_of_fp8<__half>(uint32_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return pair;
}
template <> __device__ inline uint32_t halves_of_fp8<__nv_bfloat16>(uint32_t codes) {
  uint32_t pair;
  asm("{ .reg .f16 low, high; .reg .f32 wide_low, wide_high; mov.b32 {low, high}, %1;\n"
      "cvt.f32.f16 wide_low, low; cvt.f32.f16 wide_high, high; cvt.rn.bf16x2.f32 %0, wide_high, wide_low; }"
      : "=r"(pair) : "r"(halves_of_fp8<__half>(codes)));
  return pair;
}

// A barrier in shared memory, of threads that arrive, of bytes that come, or of both; it goes round and round, and a round is
// even or odd.
struct Barrier {
  uint64_t state;
  __device__ inline void begin(int threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(threads) : "memory");
  }
  // Arrives; bytes may have come before they are expected.
  __device__ inline void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes) : "memory");
  }
  __device__ inline void wait(uint32_t round) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&state)), "r"(round) : "memory");
  }
  // For the bytes of this round; the first thread says that they are expected.
  __device__ inline void wait_for(int bytes, uint32_t round) {
    if (threadIdx.x == 0) expect(bytes);
    wait(round);
  }
};
// What `begin` did is seen by the cluster, and by copies, once its blocks have met.
__device__ inline void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Sends numbers to where `to`, in this block's shared memory, lies in that of another block of the cluster; there, they count
// towards its barrier.
__device__ inline void send(int rank, float* to, float value, Barrier& there) {
  asm volatile(
      "{ .reg .b32 place, barrier; mapa.shared::cluster.u32 place, %0, %3; mapa.shared::cluster.u32 barrier, %1, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %2, [barrier]; }" ::"r"(shared_address(to)),
      "r"(shared_address(&there.state)), "f"(value), "r"(rank) : "memory");
}
__device__ inline void send(int rank, float4* to, const float4& value, Barrier& there) {
  asm volatile(
      "{ .reg .b32 place, barrier; mapa.shared::cluster.u32 place, %0, %6; mapa.shared::cluster.u32 barrier, %1, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%2,%3,%4,%5}, [barrier]; }" ::"r"(shared_address(to)),
      "r"(shared_address(&there.state)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(rank) : "memory");
}
#endif

// Numbers in global memory for other blocks, each with a mark in the same word: whoever finds the mark has the number, and
// nothing else need be in order. Takes four, on 16 bytes, as soon as all have the mark.
__device__ inline void put_marked(uint64_t* to, float value, unsigned mark) {
  asm volatile("{ .reg .b64 word; mov.b64 word, {%1, %2};\n"
               "st.relaxed.gpu.global.b64 [%0], word; }" ::"l"(to), "f"(value), "r"(mark) : "memory");
}
__device__ inline void wait_for_marked(const uint64_t* from, unsigned mark, float (&to)[4]) {
  unsigned marks[4];
  do {
    for (int i = 0; i < 4; i += 2)
      asm volatile("{ .reg .b64 first, second; ld.relaxed.gpu.global.v2.b64 {first, second}, [%4];\n"
                   "mov.b64 {%0, %1}, first; mov.b64 {%2, %3}, second; }"
                   : "=f"(to[i]), "=r"(marks[i]), "=f"(to[i + 1]), "=r"(marks[i + 1]) : "l"(from + i) : "memory");
  } while (marks[0] != mark || marks[1] != mark || marks[2] != mark || marks[3] != mark);
}
// Whether all other blocks of so many have been here, and what they wrote before can be read; the last sets the counter back.
__device__ inline bool comes_last(unsigned* counter, unsigned blocks) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();  // all threads have written before one of them counts
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) == blocks - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return is_last;
}
// Where kernels may begin before those in front have ended: wait for them, and let the next one begin.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
