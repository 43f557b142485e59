// The instructions that CUDA C++ has no words for, each as a function; nothing else here is written in PTX.
#pragma once
#include "common.cuh"

__device__ inline uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// 16 bytes from global to shared memory, on their way from now on; without `there`, 16 zeros.
__device__ inline void copy_16(void* to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0) : "memory");
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
// What was sent off since the last call is a group, also where that is nothing; a thread waits for all but its last N groups.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8 x 8 matrices of halves for tensor cores; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Stores a number where `at`, in this block's shared memory, lies in that of another block of the cluster.
__device__ inline void tell(int rank, float* at, float value) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }" ::"r"(
                   shared_address(at)), "r"(rank), "f"(value) : "memory");
}
#endif

// One more on a counter in global memory, behind all that was written before; and a look at it, ahead of all reads after.
__device__ inline void count_up(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned look_at(const unsigned* counter) {
  unsigned seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}
