// float16 on a CPU, for tests.
#pragma once
#include "cuda_runtime.h"

struct __half { uint16_t bits; };
inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}
inline __half __float2half_rn(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return {0x7fff};
  const float size = std::fabs(x);
  if (size == 0) return {sign};
  if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent;
  std::frexp(size, &exponent);
  exponent = std::max(exponent, -13);  // below, all have the smallest step
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));  // 1024 to 2048 where not below
  return {static_cast<uint16_t>(sign | (((exponent + 13) << 10) + steps))};
}
