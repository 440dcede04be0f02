// 16-bit casts of many parameters, with one node of autograd's graph for several of them.

#pragma once

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "masters.h"
#include "objects.h"

namespace {

namespace autograd = torch::autograd;

// The backward node of casts. autograd has converted the gradients to the parameters' dtype already.
struct CastBackward : autograd::Node {
  autograd::variable_list apply(autograd::variable_list&& gradients) override { return std::move(gradients); }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  autograd::variable_list apply_with_saved(
      const autograd::variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables&) override {
    return gradients;
  }
};

using NodePointer = decltype(autograd::Edge::function);  // another type since torch 2.13

// Makes a node, behind the pointer type of this torch version.
template <class Kind, class Pointer>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>) return std::make_shared<Kind>();
  else return c10::make_intrusive<Kind>();
}

// Rounds a float32 tensor to a 16-bit dtype without torch's dispatcher, which takes longer than a small weight.
at::Tensor rounded(const at::Tensor& values, at::ScalarType type) {
  const at::Tensor made(at::detail::empty_strided_cpu(values.sizes(), values.strides(), type));
  const float* from = values.const_data_ptr<float>();
  uint16_t* to = static_cast<uint16_t*>(made.mutable_data_ptr());
  at::parallel_for(0, values.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    (type == at::kHalf ? round_to_float16 : round_to_bfloat16)(from + begin, to + begin, end - begin);
  });
  return made;
}

// casts(parameters, kind, dtype, numbers): the casts of parameters to a 16-bit dtype, as tensors of the class `kind`.
//
// None in place of one that is of another class, no leaf, or sparse. A backward node is for casts of `numbers`
// elements.
PyObject* casts(PyObject*, PyObject* arguments) {
  PyObject *given, *kind, *dtype;
  Py_ssize_t numbers;
  if (!PyArg_ParseTuple(arguments, "O!OO!n", &PyList_Type, &given, &kind, &THPDtypeType, &dtype, &numbers))
    return nullptr;
  return with_errors([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(given);
    std::vector<at::Tensor> from, to, slow, copies;
    std::vector<bool> is_ordinary;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      is_ordinary.push_back(reinterpret_cast<PyObject*>(Py_TYPE(item)) == kind && THPVariable_Check(item));
      if (!is_ordinary[i]) continue;
      const at::Tensor& parameter = THPVariable_Unpack(item);
      is_ordinary[i] = parameter.layout() == at::kStrided && parameter.is_leaf() && !parameter.is_inference();
      if (is_ordinary[i]) from.push_back(parameter);
    }
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
      const bool is_known = type == at::kHalf || type == at::kBFloat16;
      for (const at::Tensor& each : from) {
        const bool is_fast = is_known && is_plain(each, at::kFloat) && each.is_non_overlapping_and_dense();
        to.push_back(is_fast ? rounded(each, type) : at::empty_like(each, each.options().dtype(type)));
        if (is_fast) continue;
        slow.push_back(each);
        copies.push_back(to.back());
      }
      if (!slow.empty()) at::_foreach_copy_(copies, slow);
    }
    NodePointer node;
    int64_t recorded = 0;
    for (size_t i = 0; i < from.size() && at::GradMode::is_enabled(); ++i) {
      if (!from[i].requires_grad()) continue;
      if (node == nullptr || recorded + from[i].numel() > numbers) {
        node = new_node<CastBackward, NodePointer>();
        recorded = 0;
      }
      recorded += from[i].numel();
      // autograd converts gradients to the dtype of this metadata, which is the parameter's.
      const uint32_t place = node->add_input_metadata(from[i]);
      node->add_next_edge(autograd::impl::gradient_edge(from[i]));
      autograd::impl::set_gradient_edge(to[i], {node, place});
    }
    PyObject* made = PyList_New(count);
    size_t next = 0;
    for (Py_ssize_t i = 0; i < count && made != nullptr; ++i) {
      PyTypeObject* type = reinterpret_cast<PyTypeObject*>(kind);
      PyObject* wrapped = is_ordinary[i] ? THPVariable_Wrap(to[next++], type) : Py_NewRef(Py_None);
      if (wrapped == nullptr) Py_CLEAR(made);
      else PyList_SET_ITEM(made, i, wrapped);
    }
    return made;
  });
}

}  // namespace
