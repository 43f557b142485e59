// Clusters of blocks on a CPU, for tests.
#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {
struct cluster_group {
  int block_rank() const { return on_cpu::now->block % on_cpu::grid->cluster; }
  void sync() const {
    on_cpu::meet(on_cpu::grid->of_cluster[on_cpu::now->block / on_cpu::grid->cluster], on_cpu::grid->cluster * on_cpu::grid->threads);
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
