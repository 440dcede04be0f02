// Operations on whole tensors: checks for inf and nan, multiplication, and comparisons of weights with their masters.

#pragma once

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "masters.h"
#include "objects.h"
#include "weights.h"

namespace {

// Bytes of a cache line, and numbers that are prefetched while as many are compared.
constexpr int64_t LINE = 64, FETCHED = 1024;

// Calls work(begin, end) for parts of n numbers, on several threads, until a call returns false; whether none did.
template <class Work>
bool all_of(int64_t n, Work work) {
  std::atomic<bool> are = true;
  at::parallel_for(0, n, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end && are; from += GRAIN)
      if (!work(from, std::min(from + GRAIN, end))) are = false;
  });
  return are;
}

// Whether all numbers of a tensor are finite; Bits are those of one number, and `infinite` is inf.
template <class Bits>
bool is_finite(const at::Tensor& t, Bits infinite) {
  const Bits* numbers = static_cast<const Bits*>(t.const_data_ptr());
  return all_of(t.numel(), [&](int64_t begin, int64_t end) {
    Bits largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max<Bits>(largest, numbers[i] & infinite);
    return largest != infinite;
  });
}

// are_finite(tensors): whether all numbers are finite; None if torch's operations have to check one.
PyObject* are_finite(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return with_errors([&]() -> PyObject* {
    std::vector<const at::Tensor*> tensors;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (!is_plain(t, at::kFloat) && !is_plain(t, at::kBFloat16) && !is_plain(t, at::kHalf)) Py_RETURN_NONE;
      if (!t.is_non_overlapping_and_dense()) Py_RETURN_NONE;
      tensors.push_back(&t);
    }
    bool are = true;
    {
      ReleasedGil released;
      for (const at::Tensor* t : tensors)
        are = are && (t->scalar_type() == at::kFloat ? is_finite<uint32_t>(*t, INFINITE)
                        : is_finite<uint16_t>(*t, t->scalar_type() == at::kHalf ? 0x7C00 : 0x7F80));
    }
    return PyBool_FromLong(are);
  });
}

// multiply(tensors, factor, is_counted, are_weights): multiplies float32 tensors in place by a 0-dimensional one.
//
// is_counted: whether their version counters count it. are_weights: multiplies the gradients of these weights, some of
// which may be None. Returns whether all numbers were finite before; None, with nothing done, if torch has to do it.
PyObject* multiply(PyObject*, PyObject* arguments) {
  PyObject *given, *by;
  int is_counted, are_weights;
  if (!PyArg_ParseTuple(arguments, "O!Opp", &PyList_Type, &given, &by, &is_counted, &are_weights)) return nullptr;
  if (!THPVariable_CheckExact(by)) Py_RETURN_NONE;
  return with_errors([&]() -> PyObject* {
    const at::Tensor& factor = THPVariable_Unpack(by);
    if (!is_plain(factor, at::kFloat) || factor.numel() != 1) Py_RETURN_NONE;
    std::vector<at::Tensor> tensors;
    tensors.reserve(PyList_GET_SIZE(given));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      if (are_weights ? !THPVariable_Check(item) : !THPVariable_CheckExact(item)) Py_RETURN_NONE;
      const at::Tensor& tensor = are_weights ? THPVariable_Unpack(item).grad() : THPVariable_Unpack(item);
      if (!tensor.defined() && are_weights) continue;
      if (!is_plain(tensor, at::kFloat) || !tensor.is_non_overlapping_and_dense()) Py_RETURN_NONE;
      tensors.push_back(tensor);
    }
    const float times = *factor.const_data_ptr<float>();
    std::atomic<bool> are = true;
    for (const at::Tensor& tensor : tensors)
      if (is_counted) tensor.unsafeGetTensorImpl()->bump_version();
    {
      ReleasedGil released;
      for (const at::Tensor& tensor : tensors) {
        float* numbers = tensor.mutable_data_ptr<float>();
        at::parallel_for(0, tensor.numel(), GRAIN, [&](int64_t begin, int64_t end) {
          uint32_t largest = 0;
          for (int64_t i = begin; i < end; ++i) {
            largest = std::max(largest, bits_of(numbers[i]) & INFINITE);
            numbers[i] *= times;
          }
          if (largest == INFINITE) are = false;
        });
      }
    }
    return PyBool_FromLong(are);
  });
}

// Finds the memory of a weight with a split master; false if torch's operations have to read it, or if the weight has
// other memory than when its master was made.
bool find_split_master(PyObject* own, PyObject* master, Weight& w) {
  if (!THPVariable_Check(own)) return false;
  const at::Tensor& weight = THPVariable_Unpack(own);
  if (!find_halves(weight, master, w) || !weight.is_non_overlapping_and_dense()) return false;
  Object address(attribute(master, ADDRESS));
  w.size = weight.numel();
  return address.held != nullptr && PyLong_AsVoidPtr(address.held) == weight.data_ptr();
}

// joined(weights, masters): new float32 tensors with the values of split masters. None if torch's operations have to
// compute one.
PyObject* joined(PyObject*, PyObject* arguments) {
  PyObject *owns, *masters;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &owns, &PyList_Type, &masters)) return nullptr;
  return with_errors([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(owns);
    std::vector<Weight> weights(count);
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!find_split_master(PyList_GET_ITEM(owns, i), PyList_GetItem(masters, i), weights[i])) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    std::vector<at::Tensor> made;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const at::Tensor& weight = THPVariable_Unpack(PyList_GET_ITEM(owns, i));
      made.emplace_back(at::detail::empty_strided_cpu(weight.sizes(), weight.strides(), at::kFloat));
      weights[i].values = made.back().mutable_data_ptr<float>();
    }
    {
      ReleasedGil released;
      for (const Weight& w : weights)
        at::parallel_for(0, w.size, GRAIN, [&](int64_t begin, int64_t end) {
          join(w.weight + begin, w.remainder + begin, w.values + begin, end - begin);
        });
    }
    PyObject* found = PyList_New(count);
    for (Py_ssize_t i = 0; i < count && found != nullptr; ++i) {
      PyObject* wrapped = THPVariable_Wrap(made[i]);
      if (wrapped == nullptr) Py_CLEAR(found);
      else PyList_SET_ITEM(found, i, wrapped);
    }
    return found;
  });
}

// Prefetches memory: the processor's own prefetching ends at each page.
void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(static_cast<const char*>(from) + at);
}

// Whether values are those of split masters, bit for bit.
bool are_joined(const float* values, const uint16_t* weight, const int16_t* remainder, int64_t n) {
  float expected[CHUNK];
  for (int64_t begin = 0; begin < n; begin += CHUNK) {
    const int64_t count = std::min(CHUNK, n - begin);
    join(weight + begin, remainder + begin, expected, count);
    if (std::memcmp(expected, values + begin, count * sizeof(float)) != 0) return false;
  }
  return true;
}

// differing(values, weights, masters): the indices of float32 tensors that differ from the masters of these weights.
//
// masters: None if the values are full masters, which differ if the weight is not their rounding; or split masters,
// which have to have these values, bit for bit. Returns None if torch's operations have to compare one.
PyObject* differing(PyObject*, PyObject* arguments) {
  PyObject *values, *owns, *masters;
  if (!PyArg_ParseTuple(arguments, "O!O!O", &PyList_Type, &values, &PyList_Type, &owns, &masters)) return nullptr;
  return with_errors([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(owns);
    std::vector<Weight> weights(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject *own = PyList_GET_ITEM(owns, i), *item = PyList_GetItem(values, i);
      Weight& w = weights[i];
      bool is_known = item != nullptr && THPVariable_Check(own) && THPVariable_Check(item);
      if (is_known) {
        const at::Tensor &weight = THPVariable_Unpack(own), &wide = THPVariable_Unpack(item);
        is_known = is_plain(wide, at::kFloat) && has_layout_of(wide, weight) && weight.is_non_overlapping_and_dense();
        if (masters != Py_None) {
          is_known = is_known && PyList_Check(masters) && find_split_master(own, PyList_GetItem(masters, i), w);
        } else if (is_known) {
          w.is_float16 = is_plain(weight, at::kHalf);
          is_known = w.is_float16 || is_plain(weight, at::kBFloat16);
          w.weight = static_cast<uint16_t*>(const_cast<void*>(weight.const_data_ptr()));
          w.size = weight.numel();
        }
        if (is_known) w.values = const_cast<float*>(wide.const_data_ptr<float>());
      }
      if (!is_known) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    }
    std::vector<Py_ssize_t> found;
    {
      ReleasedGil released;
      for (Py_ssize_t i = 0; i < count; ++i) {
        const Weight& w = weights[i];
        const bool are_same = all_of(w.size, [&](int64_t begin, int64_t end) {
          bool are = true;
          for (int64_t at = begin; at < end && are; at += FETCHED) {
            const int64_t n = std::min(FETCHED, end - at), next = std::min(FETCHED, w.size - at - n);
            fetch(w.values + at + n, next * sizeof(float));
            fetch(w.weight + at + n, next * sizeof(uint16_t));
            if (w.remainder != nullptr) fetch(w.remainder + at + n, next * sizeof(int16_t));
            are = w.remainder != nullptr ? are_joined(w.values + at, w.weight + at, w.remainder + at, n)
                                         : are_rounded(w.values + at, w.weight + at, w.is_float16, n);
          }
          return are;
        });
        if (!are_same) found.push_back(i);
      }
    }
    PyObject* indices = PyList_New(found.size());
    for (size_t i = 0; i < found.size() && indices != nullptr; ++i)
      PyList_SET_ITEM(indices, i, PyLong_FromSsize_t(found[i]));
    return indices;
  });
}

}  // namespace
