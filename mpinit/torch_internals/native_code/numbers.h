// Floating-point numbers and their bits.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

// All bits of a float32 number but its sign, and the bits of inf.
constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Computes a * b + c as torch's kernels on this machine do. The builder sets ONE_ROUNDING where they round it once.
inline float fused(float a, float b, float c) {
  return ONE_ROUNDING ? __builtin_fmaf(a, b, c) : a * b + c;
}

}  // namespace
