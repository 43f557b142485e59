// What tilestack/kernels/cuda/ptx.cuh has in PTX, on a CPU, for tests.
#pragma once
#include "common.cuh"

inline void copy_16(void* to, const void* from, bool there = true) { on_cpu::now->open.push_back({to, there ? from : nullptr, 16}); }
inline void copy_4(void* to, const void* from, bool there = true) { on_cpu::now->open.push_back({to, there ? from : nullptr, 4}); }
inline void close_group() {
  on_cpu::now->groups.push_back(std::move(on_cpu::now->open));
  on_cpu::now->open.clear();
}
template <int N> void wait_for_all_but() {
  auto& groups = on_cpu::now->groups;
  for (; groups.size() > N; groups.pop_front())
    for (auto [to, from, bytes] : groups.front()) from == nullptr ? memset(to, 0, bytes) : memcpy(to, from, bytes);
}
inline void fetch_to_l2(const void*) {}
inline void compute_here(uint32_t word) {
  if (word == 0x0f0f0f0f) abort();
}
inline void copy_16_aside(void* to, const void* from) { copy_16(to, from); }
inline uint4 load_16_aside(const void* from) { return *static_cast<const uint4*>(from); }
inline void close_group_aside() { close_group(); }
template <int N> void wait_aside_for_all_but() { wait_for_all_but<N>(); }

// Matrix m's row r is at the address of lane 8 m + r; lane l gets elements 2 (l % 4) and the next of row l / 4.
inline void load_matrices(uint32_t (&to)[4], const void* row) {
  auto& rows = on_cpu::grid->of_matrices[on_cpu::warp()];
  memcpy(&rows[on_cpu::lane() * 4], row, 16);
  on_cpu::meet_warp();
  for (int matrix = 0; matrix < 4; matrix++) to[matrix] = rows[(matrix * 8 + on_cpu::lane() / 4) * 4 + on_cpu::lane() % 4];
  on_cpu::meet_warp();
}

inline uint32_t turned(uint32_t pair) {
  auto& rows = on_cpu::grid->of_matrices[on_cpu::warp()];
  const int lane = on_cpu::lane();
  rows[lane] = pair;
  on_cpu::meet_warp();
  const auto element = [&](int row, int column) { return rows[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff; };
  const uint32_t found = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  on_cpu::meet_warp();
  return found;
}

template <typename T> float half_of(uint32_t pair, int which) {
  const uint16_t bits = static_cast<uint16_t>(pair >> 16 * which);
  T value;
  memcpy(&value, &bits, 2);
  return widen(value);
}
// Fragments as the PTX manual draws them: a thread shows the others its parts of a and b, and adds to its own part of c.
template <typename T> void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  auto& lanes = on_cpu::grid->of_matrices[on_cpu::warp()];
  const int lane = on_cpu::lane(), group = lane / 4, in_group = lane % 4;
  float left[2][16], right[2][16];
  memcpy(&lanes[lane * 4], a, 16);
  on_cpu::meet_warp();
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 16; k++)  // row group + 8 half: register half + 2 (k / 8) of lane 4 group + k % 8 / 2
      left[half][k] = half_of<T>(lanes[(4 * group + k % 8 / 2) * 4 + half + 2 * (k / 8)], k % 2);
  on_cpu::meet_warp();
  memcpy(&lanes[lane * 4], b, 8);
  on_cpu::meet_warp();
  for (int j = 0; j < 2; j++)
    for (int k = 0; k < 16; k++)  // column 2 in_group + j: register k / 8 of lane 4 column + k % 8 / 2
      right[j][k] = half_of<T>(lanes[(4 * (2 * in_group + j) + k % 8 / 2) * 4 + k / 8], k % 2);
  on_cpu::meet_warp();
  for (int half = 0; half < 2; half++)
    for (int j = 0; j < 2; j++)
      for (int k = 0; k < 16; k++) c[2 * half + j] += left[half][k] * right[j][k];
}

template <typename T> uint32_t pair_of(float low, float high) {
  const T both[2] = {rounded<T>(low), rounded<T>(high)};
  uint32_t pair;
  return memcpy(&pair, both, 4), pair;
}
template <typename T> uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  return pair_of<T>(half_of<T>(a, 0) - half_of<T>(b, 0), half_of<T>(a, 1) - half_of<T>(b, 1));
}
template <typename T> uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto of = [=](int which) { return std::fma(half_of<T>(a, which), half_of<T>(b, which), half_of<T>(c, which)); };
  return pair_of<T>(of(0), of(1));
}
inline uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) ^ bits; }
// A sign, four bits of exponent, three of mantissa; the last code of either sign is NaN.
inline float number_of_fp8(uint32_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}
template <typename T> uint32_t halves_of_fp8(uint32_t codes) {
  return pair_of<T>(number_of_fp8(codes & 0xff), number_of_fp8(codes >> 8 & 0xff));
}

// Bytes are on their way until somebody waits for the barrier towards which they count.
struct Barrier {
  uint8_t threads, missing, round;
  int32_t bytes;
  void begin(int count) { *this = {static_cast<uint8_t>(count), static_cast<uint8_t>(count), 0, 0}; }
  void expect(int more) {
    missing--, bytes += more;
    settle();
  }
  void wait(uint32_t parity) {
    while (round == parity) {
      auto& coming = on_cpu::grid->coming[this];
      for (; round == parity && !coming.empty(); coming.pop_front()) {
        const auto& [to, contents] = coming.front();
        memcpy(to, contents.data(), contents.size());
        bytes -= static_cast<int>(contents.size());
        settle();
      }
      if (round == parity) on_cpu::give_way();
    }
  }
  void wait_for(int more, uint32_t parity) {
    if (threadIdx.x == 0) expect(more);
    wait(parity);
  }
  void settle() {
    if (missing == 0 && bytes == 0) missing = threads, round ^= 1;
  }
};
static_assert(sizeof(Barrier) == 8);
inline void barriers_begun() {}

inline void come(void* to, const void* from, size_t bytes, Barrier* there) {
  const auto* first = static_cast<const unsigned char*>(from);
  on_cpu::grid->coming[there].push_back({to, {first, first + bytes}});
}
template <typename T> void send(int rank, T* to, const T& value, Barrier& there) {
  const auto& shared = on_cpu::grid->shared;
  const int mine = on_cpu::now->block, first = mine / on_cpu::grid->cluster * on_cpu::grid->cluster;
  const auto in_theirs = [&](void* at) { return shared[first + rank] + (static_cast<unsigned char*>(at) - shared[mine]); };
  come(in_theirs(to), &value, sizeof(T), reinterpret_cast<Barrier*>(in_theirs(&there)));
}
inline void put_marked(uint64_t* to, float value, unsigned mark) {
  memcpy(to, &value, 4), memcpy(reinterpret_cast<char*>(to) + 4, &mark, 4);
}
inline void wait_for_marked(const uint64_t* from, unsigned mark, float (&to)[4]) {
  for (int i = 0; i < 4; i++) {
    while (from[i] >> 32 != mark) on_cpu::give_way();
    memcpy(&to[i], from + i, 4);
  }
}
inline bool comes_last(unsigned* counter, unsigned blocks) {
  static bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ++*counter == blocks;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  return is_last;
}
inline void wait_for_kernels_before() {}
