// The words of tilestack/ops/random.py: Philox 4x32-10 of a seed and a position, the same bits as there.

#pragma once

#include <cstdint>

namespace {

constexpr int64_t SLAB = 1024;  // consecutive elements that take the same word of consecutive counters

// The four words of counters `first` … `first` + count - 1, each `SLAB` numbers apart.
void philox(uint64_t seed, int64_t first, int64_t count, uint32_t* words) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t counter = first + i;
        uint32_t a = counter, b = counter >> 32, c = 0, d = 0, key_a = seed, key_b = seed >> 32;
        for (int round = 0; round < 10; round++) {
            const uint64_t one = 0xD2511F53ull * a, other = 0xCD9E8D57ull * c;
            a = uint32_t(other >> 32) ^ b ^ key_a, b = other, c = uint32_t(one >> 32) ^ d ^ key_b, d = one;
            key_a += 0x9E3779B9, key_b += 0xBB67AE85;
        }
        words[i] = a, words[SLAB + i] = b, words[2 * SLAB + i] = c, words[3 * SLAB + i] = d;
    }
}

}  // namespace
