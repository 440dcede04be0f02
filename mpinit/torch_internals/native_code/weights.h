// Weights as a step uses them: their memory, masters, gradients and states, found in Python's objects.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "codecs.h"
#include "objects.h"
#include "updates.h"

namespace {

// Finds an entry of a weight's state; false if there is none, or if torch's operations have to step it.
bool find_state(PyObject* entries, const char* name, const at::Tensor& weight, State& found) {
  PyObject* entry = PyDict_GetItem(entries, named(name));
  if (entry == nullptr || !THPVariable_Check(entry)) return false;
  const at::Tensor& state = THPVariable_Unpack(entry);
  if (!has_layout_of(state, weight)) return false;
  if (is_plain(state, at::kFloat) && THPVariable_CheckExact(entry)) {
    found.values = state.mutable_data_ptr<float>();
    return true;
  }
  Object codes(attribute(entry, CODES));
  if (codes.held == nullptr || !PyTuple_Check(codes.held)) return false;
  const int64_t rows = (weight.numel() + BLOCK - 1) / BLOCK;
  // A part of the encoded state, if it has this dtype and number of elements.
  const auto part = [&](Py_ssize_t place, at::ScalarType dtype, int64_t places) -> const at::Tensor* {
    PyObject* item = PyTuple_GET_ITEM(codes.held, place);
    if (!THPVariable_CheckExact(item)) return nullptr;
    const at::Tensor& t = THPVariable_Unpack(item);
    return is_plain(t, dtype) && t.is_contiguous() && t.numel() == places ? &t : nullptr;
  };
  if (PyTuple_GET_SIZE(codes.held) == 1) {
    const at::Tensor* narrow = part(0, at::kBFloat16, rows * BLOCK);
    if (narrow != nullptr) found.narrow = reinterpret_cast<uint16_t*>(narrow->mutable_data_ptr<at::BFloat16>());
  } else if (PyTuple_GET_SIZE(codes.held) == 2) {
    const at::Tensor *bytes = part(0, at::kByte, rows * BLOCK), *scales = part(1, at::kFloat, rows);
    if (bytes == nullptr || scales == nullptr) return false;
    found.codes = bytes->mutable_data_ptr<uint8_t>();
    found.scales = scales->mutable_data_ptr<float>();
  }
  return found.is_encoded();
}

// Finds the memory of a weight with a split master; false if torch's operations have to work on it.
bool find_halves(const at::Tensor& weight, PyObject* master, Weight& w) {
  if (master == Py_None) return false;
  Object lower(attribute(master, REMAINDER)), strides(attribute(master, STRIDES));
  if (lower.held == nullptr || !THPVariable_CheckExact(lower.held) || strides.held == nullptr) return false;
  const at::Tensor& remainder = THPVariable_Unpack(lower.held);
  if (!is_plain(weight, at::kBFloat16) || !is_plain(remainder, at::kShort)) return false;
  if (!remainder.is_contiguous() || remainder.numel() != weight.numel() || !PyTuple_Check(strides.held)) return false;
  if (PyTuple_GET_SIZE(strides.held) != weight.dim()) return false;
  for (int64_t d = 0; d < weight.dim(); ++d)
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(strides.held, d)) != weight.stride(d)) return false;
  w.weight = reinterpret_cast<uint16_t*>(weight.mutable_data_ptr<at::BFloat16>());
  w.remainder = remainder.mutable_data_ptr<int16_t>();
  return true;
}

// Finds the gradient of a weight with a split master: bfloat16, or float32 after several backward passes.
bool find_gradient(const at::Tensor& gradient, Weight& w) {
  if (is_plain(gradient, at::kFloat)) w.gradient = gradient.const_data_ptr<float>();
  else if (is_plain(gradient, at::kBFloat16))
    w.short_gradient = reinterpret_cast<const uint16_t*>(gradient.const_data_ptr<at::BFloat16>());
  return w.gradient != nullptr || w.short_gradient != nullptr;
}

// Finds a weight's full master and gradient, or those of a float32 weight; false if torch's operations have to step it.
bool find_values(const at::Tensor& weight, PyObject* master, Weight& w) {
  const at::Tensor& gradient = weight.grad();
  if (!is_plain(gradient, at::kFloat)) return false;
  w.gradient = gradient.const_data_ptr<float>();
  if (master == Py_None) {
    if (!is_plain(weight, at::kFloat)) return false;
    w.values = weight.mutable_data_ptr<float>();
    return true;
  }
  Object parameter(attribute(master, PARAMETER)), clamps(attribute(master, CLAMPS));
  if (parameter.held == nullptr || !THPVariable_Check(parameter.held) || clamps.held != Py_False) return false;
  const at::Tensor& values = THPVariable_Unpack(parameter.held);
  w.is_float16 = is_plain(weight, at::kHalf);
  if (!w.is_float16 && !is_plain(weight, at::kBFloat16)) return false;
  if (!is_plain(values, at::kFloat) || !has_layout_of(values, weight)) return false;
  w.weight = static_cast<uint16_t*>(weight.mutable_data_ptr());
  w.values = values.mutable_data_ptr<float>();
  w.master = values.unsafeGetTensorImpl();
  return true;
}

// Adds a weight to `found` if it has a gradient; false if torch's operations have to step it.
bool find(
    PyObject* own, PyObject* master, bool is_split, PyObject* states, int64_t smallest, const Options& o,
    std::vector<Weight>& found) {
  if (!THPVariable_Check(own)) return false;
  const at::Tensor& weight = THPVariable_Unpack(own);
  const at::Tensor& gradient = weight.grad();
  if (!gradient.defined()) return true;
  Weight w{};
  if (is_split ? !find_halves(weight, master, w) || !find_gradient(gradient, w) : !find_values(weight, master, w))
    return false;
  if (!has_layout_of(gradient, weight) || !weight.is_non_overlapping_and_dense()) return false;
  w.size = weight.numel();
  w.impl = weight.unsafeGetTensorImpl();
  PyObject* entries = PyDict_GetItem(states, own);
  const Py_ssize_t kept = entries == nullptr || !PyDict_Check(entries) ? -1 : PyDict_GET_SIZE(entries);
  const int count = o.is_adam ? 2 : o.momentum != 0 ? 1 : 0;
  if (count > 0 && kept < 0) return false;
  if (o.is_adam) {
    PyObject* step = kept == 3 ? PyDict_GetItem(entries, named(STEP)) : nullptr;
    if (step == nullptr || !THPVariable_CheckExact(step)) return false;
    const at::Tensor& steps = THPVariable_Unpack(step);
    if (!is_plain(steps, at::kFloat) || steps.numel() != 1) return false;
    w.count = steps.mutable_data_ptr<float>();
    compute_corrections(w, o);
  }
  const char* names[2] = {o.is_adam ? FIRST : MOMENTUM, SECOND};
  for (int which = 0; which < count; ++which) {
    if (!find_state(entries, names[which], weight, w.states[which])) return false;
    // This state is float32, but has to be encoded: torch's operations do that once.
    if (w.states[which].values != nullptr && smallest >= 0 && w.size >= smallest && weight.dim() > 0) return false;
  }
  found.push_back(w);
  return true;
}

// Whether no two weights share memory. torch steps such weights one after another.
bool are_disjoint(const std::vector<Weight>& weights) {
  std::vector<std::pair<const char*, const char*>> ranges;
  std::vector<const void*> kept;
  for (const Weight& w : weights) {
    if (w.weight != nullptr) ranges.emplace_back((const char*)w.weight, (const char*)(w.weight + w.size));
    if (w.values != nullptr) ranges.emplace_back((const char*)w.values, (const char*)(w.values + w.size));
    if (w.count != nullptr && w.size > 0) kept.push_back(w.count);
    for (const State& state : w.states)
      for (const void* each : {static_cast<const void*>(state.values), static_cast<const void*>(state.narrow),
                               static_cast<const void*>(state.codes)})
        if (each != nullptr && w.size > 0) kept.push_back(each);
  }
  std::sort(ranges.begin(), ranges.end());
  std::sort(kept.begin(), kept.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second) return false;
  return std::adjacent_find(kept.begin(), kept.end()) == kept.end();
}

}  // namespace
