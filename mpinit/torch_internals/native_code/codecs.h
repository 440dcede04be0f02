// Encoded states of optimizers; the specification is mpinit/masters/codecs.
//
// A row is BLOCK numbers with one scale. A group is NEIGHBOURS rows; the sum of its bits seeds the noise of its
// rounding. The last group of a tensor also has the remaining rows.

#pragma once

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "numbers.h"
#include "objects.h"

namespace {

constexpr int64_t BLOCK = 128, NEIGHBOURS = 32;

constexpr uint32_t ROW_FACTOR = 0x85EBCA6Bu, MIX = 0x27D4EB2Fu;

// Returns the seed of a row's noise, from the sum of its group's bits.
inline int32_t factor_of(uint32_t sum, int64_t row) {
  return static_cast<int32_t>((sum + static_cast<uint32_t>(row) * ROW_FACTOR) * MIX) >> 12 | 1;
}

// Returns random bits for a place of a row; only the lower 20 are used.
inline uint32_t noise(int32_t factor, int64_t place) {
  return static_cast<uint32_t>(place + 1) * static_cast<uint32_t>(factor);
}

constexpr uint32_t LEAST_BITS = 0x40000000, MARGIN = 64;
constexpr float LEAST = 2.f;

// Decodes a row of 8-bit codes. They have no signs if all numbers of the row are positive.
template <bool is_unsigned>
void decode_codes(const uint8_t* codes, float scale, float* out) {
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t sign = is_unsigned ? 0 : static_cast<uint32_t>(-(codes[i] >> 7));
    const uint32_t kept = (codes[i] ^ sign) & 255;
    const float size = (float_of((kept << (is_unsigned ? 19 : 20)) + LEAST_BITS) - LEAST) * scale;
    out[i] = is_unsigned ? size : float_of((bits_of(size) & MAGNITUDE) | (sign & ~MAGNITUDE));
  }
}

// Decodes a row; the sign of its scale says whether its codes have signs.
void decode_row(const uint8_t* codes, float scale, float* out) {
  if (std::signbit(scale)) decode_codes<true>(codes, std::fabs(scale), out);
  else decode_codes<false>(codes, std::fabs(scale), out);
}

// Returns the number of groups in a tensor.
inline int64_t groups_in(int64_t rows) {
  return std::max<int64_t>(rows / NEIGHBOURS, 1);
}

// Returns the row at which a group ends.
inline int64_t end_of_group(int64_t group, int64_t rows) {
  return group + 1 == groups_in(rows) ? rows : (group + 1) * NEIGHBOURS;
}

// Encodes a row with stochastic rounding.
template <bool is_unsigned>
void encode_numbers(const float* values, uint8_t* codes, float inverse, int32_t factor) {
  constexpr int cut_off = is_unsigned ? 19 : 20;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t bits = bits_of(values[i]), random = (noise(factor, i) & ((1u << cut_off) - 2 * MARGIN)) | MARGIN;
    const uint32_t kept = (bits_of(float_of(bits & MAGNITUDE) * inverse + LEAST) + random) >> cut_off;
    const uint8_t code = static_cast<uint8_t>(is_unsigned ? kept : kept ^ (0 - (bits >> 31)));
    codes[i] = is_unsigned && code == 0 && bits != 0 ? 1 : code;
  }
}

void encode_row(const float* values, uint8_t* codes, float* scale, int32_t factor) {
  uint32_t largest = 0, signs = 0;  // bits of positive floats, compared as integers, are in the order of the floats
  for (int64_t i = 0; i < BLOCK; ++i) {
    uint32_t bits = bits_of(values[i]), size = bits & MAGNITUDE;
    largest = size > largest ? size : largest;
    signs |= bits;
  }
  const bool is_unsigned = !(signs >> 31);
  const float top = is_unsigned ? 31 * 0x1p12f - LEAST : 15 * 0x1p13f - LEAST;
  float exact = float_of(largest) / top;
  const float tiny = std::numeric_limits<float>::min();
  exact = exact < tiny ? tiny : exact;
  if (!(bits_of(exact) < INFINITE)) {
    std::memset(codes, 255, BLOCK);
    *scale = is_unsigned ? -exact : exact;
    return;
  }
  const float cut = float_of((bits_of(exact) + 8u) & ~15u);
  (is_unsigned ? encode_numbers<true> : encode_numbers<false>)(values, codes, 1.f / cut, factor);
  *scale = is_unsigned ? -cut : cut;
}

uint32_t sum_of(const float* values, int64_t n) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += bits_of(values[i]);
  return sum;
}

// Encodes the rows of one group; `first` is its first row in the tensor.
void encode_group(const float* values, uint8_t* codes, float* scales, int64_t first, int64_t rows) {
  const uint32_t sum = sum_of(values, rows * BLOCK);
  for (int64_t row = 0; row < rows; ++row)
    encode_row(values + row * BLOCK, codes + row * BLOCK, scales + row, factor_of(sum, first + row));
}

// Rounds the numbers of one group to bfloat16 stochastically.
void round_group(const float* values, uint16_t* narrow, int64_t first, int64_t rows) {
  const uint32_t sum = sum_of(values, rows * BLOCK);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t factor = factor_of(sum, first + row);
    for (int64_t i = 0; i < BLOCK; ++i) {
      const uint32_t bits = bits_of(values[row * BLOCK + i]), up = bits + (noise(factor, i) & 0xFFFF);
      narrow[row * BLOCK + i] = static_cast<uint16_t>(((bits & MAGNITUDE) > INFINITE ? 0x7FC00000u : up) >> 16);
    }
  }
}

// Calls work(i) for each i below count, on all threads and without the GIL; each call works on `size` numbers.
template <class Work>
void for_each(int64_t count, int64_t size, Work work) {
  ReleasedGil released;
  at::parallel_for(0, count, GRAIN / size, [&](int64_t begin, int64_t end) {
    for (int64_t which = begin; which < end; ++which) work(which);
  });
}

// encode(values, codes, scales): writes codes and scales of float32 values. All tensors of these three functions are
// contiguous.
PyObject* encode(PyObject*, PyObject* arguments) {
  PyObject *values, *codes, *scales;
  if (!PyArg_ParseTuple(arguments, "OOO", &values, &codes, &scales)) return nullptr;
  return with_errors([&]() -> PyObject* {
    const float* from = THPVariable_Unpack(values).const_data_ptr<float>();
    uint8_t* to = THPVariable_Unpack(codes).mutable_data_ptr<uint8_t>();
    float* sizes = THPVariable_Unpack(scales).mutable_data_ptr<float>();
    const int64_t rows = THPVariable_Unpack(scales).numel();
    for_each(rows == 0 ? 0 : groups_in(rows), NEIGHBOURS * BLOCK, [&](int64_t group) {
      const int64_t row = group * NEIGHBOURS;
      encode_group(from + row * BLOCK, to + row * BLOCK, sizes + row, row, end_of_group(group, rows) - row);
    });
    Py_RETURN_NONE;
  });
}

// decode(codes, scales, values): writes the values.
PyObject* decode(PyObject*, PyObject* arguments) {
  PyObject *codes, *scales, *values;
  if (!PyArg_ParseTuple(arguments, "OOO", &codes, &scales, &values)) return nullptr;
  return with_errors([&]() -> PyObject* {
    const uint8_t* from = THPVariable_Unpack(codes).const_data_ptr<uint8_t>();
    const float* sizes = THPVariable_Unpack(scales).const_data_ptr<float>();
    float* to = THPVariable_Unpack(values).mutable_data_ptr<float>();
    for_each(THPVariable_Unpack(scales).numel(), BLOCK, [&](int64_t row) {
      decode_row(from + row * BLOCK, sizes[row], to + row * BLOCK);
    });
    Py_RETURN_NONE;
  });
}

// round(values, codes): rounds values to bfloat16 stochastically.
PyObject* round(PyObject*, PyObject* arguments) {
  PyObject *values, *codes;
  if (!PyArg_ParseTuple(arguments, "OO", &values, &codes)) return nullptr;
  return with_errors([&]() -> PyObject* {
    const at::Tensor& all = THPVariable_Unpack(values);
    const float* from = all.const_data_ptr<float>();
    uint16_t* to = reinterpret_cast<uint16_t*>(THPVariable_Unpack(codes).mutable_data_ptr<at::BFloat16>());
    const int64_t n = all.numel();
    const int64_t rows = n / BLOCK;
    for_each(rows == 0 ? 0 : groups_in(rows), NEIGHBOURS * BLOCK, [&](int64_t group) {
      const int64_t row = group * NEIGHBOURS;
      round_group(from + row * BLOCK, to + row * BLOCK, row, end_of_group(group, rows) - row);
    });
    Py_RETURN_NONE;
  });
}

}  // namespace
