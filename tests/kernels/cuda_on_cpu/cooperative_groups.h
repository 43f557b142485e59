// Clusters of blocks on a CPU, for tests.
#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {
struct cluster_group {
  int block_rank() const { return on_cpu::now->block % on_cpu::grid->cluster; }
  void sync() const {
    on_cpu::meet(on_cpu::grid->of_cluster[on_cpu::now->block / on_cpu::grid->cluster], on_cpu::grid->cluster * on_cpu::grid->threads);
  }
  // Where what lies in this block's shared memory lies in that of another block of the cluster.
  template <typename T> T* map_shared_rank(T* here, int rank) const {
    const auto& shared = on_cpu::grid->shared;
    const int mine = on_cpu::now->block, first = mine - block_rank();
    return reinterpret_cast<T*>(shared[first + rank] + (reinterpret_cast<unsigned char*>(here) - shared[mine]));
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
