// 16-bit weights and their float32 masters; the specification is mpinit/masters/law.py and
// mpinit/masters/float_split.py.
//
// Without F16C, c10::Half converts float16 numbers one by one.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace {

// Adds the remainders of split masters to their bfloat16 weights.
void join(const uint16_t* weight, const int16_t* remainder, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = static_cast<uint32_t>(weight[i]) << 16, magnitude = bits & MAGNITUDE;
    int32_t rest = remainder[i];
    // A 0 or inf that was written to the weight counts, and its old remainder does not.
    rest = (magnitude == 0) & (rest < 0) ? 0 : rest;
    rest = (magnitude == INFINITE) & (rest > 0) ? 0 : rest;
    out[i] = float_of(bits + static_cast<uint32_t>(rest));
  }
}

// Divides float32 values into bfloat16 weights, rounded half away from zero, and remainders.
void split(const float* values, uint16_t* weight, int16_t* remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = bits_of(values[i]);
    bits = (bits & MAGNITUDE) > INFINITE ? 0x7FC00000u : bits;  // other nans, such as CUDA's, would be rounded to 0
    remainder[i] = static_cast<int16_t>(bits & 0xFFFF);
    weight[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  }
}

// Rounds half to even, as torch does.
inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & MAGNITUDE) > INFINITE ? 0x7FC0u : rounded);
}

void round_to_bfloat16(const float* values, uint16_t* weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] = bfloat16_of(values[i]);
}

void round_to_float16(const float* values, uint16_t* weight, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(weight + i),
        _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; ++i) weight[i] = c10::Half(values[i]).x;
}

// Whether the weights are the rounded values, bit for bit.
bool are_rounded(const float* values, const uint16_t* weight, bool is_float16, int64_t n) {
  int64_t i = 0;
  if (!is_float16) {
    uint16_t differ = 0;
    for (; i < n; ++i) differ |= bfloat16_of(values[i]) ^ weight[i];
    return differ == 0;
  }
#ifdef __F16C__
  __m128i differ = _mm_setzero_si128();
  for (; i + 8 <= n; i += 8) {
    const __m128i rounded =
        _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i has = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + i));
    differ = _mm_or_si128(differ, _mm_xor_si128(rounded, has));
  }
  if (!_mm_testz_si128(differ, differ)) return false;
#endif
  for (; i < n; ++i)
    if (c10::Half(values[i]).x != weight[i]) return false;
  return true;
}

// Applies the law of full masters: an element of a weight that is not its rounded master was written to, and counts.
void follow(float* values, const uint16_t* weight, bool is_float16, uint16_t* rounded, int64_t n) {
  if (are_rounded(values, weight, is_float16, n)) return;
  (is_float16 ? round_to_float16 : round_to_bfloat16)(values, rounded, n);
  const uint32_t infinite = is_float16 ? 0x7C00 : 0x7F80, largest = infinite - 1;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t has = weight[i], would = rounded[i], size = has & 0x7FFF, other = would & 0x7FFF;
    const bool is_clamped = is_float16 && size == largest && other == infinite && (has ^ would) < 0x8000 &&
        (bits_of(values[i]) & MAGNITUDE) < INFINITE;
    if (has == would || (size == 0 && other == 0) || (size > infinite && other > infinite) || is_clamped) continue;
    values[i] = is_float16 ? static_cast<float>(c10::Half(weight[i], c10::Half::from_bits())) : float_of(has << 16);
  }
}

}  // namespace
