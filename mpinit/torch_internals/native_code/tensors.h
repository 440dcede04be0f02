// Attributes of many tensors, such as version counters and gradients, read or set in one call.

#pragma once

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "objects.h"

namespace {

// versions(tensors): the version counter of each; None if one is an inference tensor, which has none.
PyObject* versions(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    PyObject* item = PyList_GET_ITEM(given, i);
    if (!THPVariable_Check(item) || THPVariable_Unpack(item).is_inference()) Py_RETURN_NONE;
  }
  return with_errors([&]() -> PyObject* {
    PyObject* found = PyList_New(PyList_GET_SIZE(given));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given) && found != nullptr; ++i)
      PyList_SET_ITEM(found, i, PyLong_FromLong(THPVariable_Unpack(PyList_GET_ITEM(given, i))._version()));
    return found;
  });
}

// changed_versions(tensors, expected): the same as versions(tensors); None if all versions are the expected ones.
PyObject* changed_versions(PyObject* self, PyObject* args) {
  PyObject *tensors, *expected;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &expected)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  bool are_same = count == PyList_GET_SIZE(expected);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(item) || THPVariable_Unpack(item).is_inference())
      return PyErr_Format(PyExc_TypeError, "changed_versions() reads tensors with versions");
    are_same = are_same && THPVariable_Unpack(item)._version() == PyLong_AsLongLong(PyList_GET_ITEM(expected, i));
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  return are_same ? Py_NewRef(Py_None) : versions(self, tensors);
}

// set_data(tensors, values): sets each tensor's data. False, with nothing set, if one is of a subclass.
PyObject* set_data(PyObject*, PyObject* args) {
  PyObject *tensors, *values;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &values)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PyList_GET_SIZE(values) != count) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!is_tensor_or_parameter(PyList_GET_ITEM(tensors, i)) || !is_tensor_or_parameter(PyList_GET_ITEM(values, i)))
      Py_RETURN_FALSE;
  return with_errors([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < count; ++i)
      THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).set_data(THPVariable_Unpack(PyList_GET_ITEM(values, i)));
    Py_RETURN_TRUE;
  });
}

// layouts(tensors): bytes with each tensor's address, number of dimensions, sizes and strides. None if one of them is
// no strided tensor on the CPU.
PyObject* layouts(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return with_errors([&]() -> PyObject* {
    std::vector<int64_t> found;
    found.reserve(PyList_GET_SIZE(given) * 6);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      const bool is_here = t.is_cpu() && t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->is_python_dispatch();
      if (!is_here) Py_RETURN_NONE;
      found.push_back(reinterpret_cast<int64_t>(t.const_data_ptr()));
      found.push_back(t.dim());
      found.insert(found.end(), t.sizes().begin(), t.sizes().end());
      found.insert(found.end(), t.strides().begin(), t.strides().end());
    }
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int64_t));
  });
}

// are_bare(tensors): whether each requires grad, and has no hooks and nothing in its __dict__. None if the argument is
// no list of tensors.
PyObject* are_bare(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    PyObject* item = PyList_GET_ITEM(given, i);
    if (!THPVariable_Check(item)) Py_RETURN_NONE;
    const THPVariable* tensor = reinterpret_cast<THPVariable*>(item);
    const auto is_set = [](PyObject* hooks) { return hooks != nullptr && hooks != Py_None; };
    if (is_set(tensor->backward_hooks) || is_set(tensor->post_accumulate_grad_hooks)) Py_RETURN_FALSE;
    if (!THPVariable_Unpack(item).requires_grad()) Py_RETURN_FALSE;
    Object attributes(PyObject_GenericGetDict(item, nullptr));
    if (attributes.held == nullptr) PyErr_Clear();
    else if (PyDict_GET_SIZE(attributes.held) != 0) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// concatenated(tensors): one int16 tensor with the bits of several 16-bit tensors. None if torch has to make it.
PyObject* concatenated(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return with_errors([&]() -> PyObject* {
    int64_t size = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (!t.is_contiguous() || (!is_plain(t, at::kBFloat16) && !is_plain(t, at::kHalf))) Py_RETURN_NONE;
      size += t.numel();
    }
    const at::Tensor made(at::detail::empty_cpu({size}, at::kShort));
    int16_t* to = made.mutable_data_ptr<int16_t>();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (t.numel() > 0) std::memcpy(to, t.const_data_ptr(), t.numel() * sizeof(int16_t));
      to += t.numel();
    }
    return THPVariable_Wrap(made);
  });
}

PyObject* list_of_grads(PyObject* tensors) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  PyObject* found = PyList_New(count);
  for (Py_ssize_t i = 0; i < count && found != nullptr; ++i) {
    const at::Tensor& grad = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
    PyObject* wrapped = grad.defined() ? THPVariable_Wrap(grad) : Py_NewRef(Py_None);
    if (wrapped == nullptr) Py_CLEAR(found);
    else PyList_SET_ITEM(found, i, wrapped);
  }
  return found;
}

bool are_tensors(PyObject* list) {
  if (!PyList_Check(list)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    if (!THPVariable_Check(PyList_GET_ITEM(list, i))) return false;
  return true;
}

// grads(tensors): each tensor's grad. None if the argument is no list of tensors.
PyObject* grads(PyObject*, PyObject* given) {
  if (!are_tensors(given)) Py_RETURN_NONE;
  return with_errors([&] { return list_of_grads(given); });
}

// changed_grads(tensors, expected): each tensor's grad; None if all are the expected objects.
PyObject* changed_grads(PyObject*, PyObject* args) {
  PyObject *tensors, *expected;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &expected)) return nullptr;
  if (!are_tensors(tensors)) return PyErr_Format(PyExc_TypeError, "changed_grads() reads tensors");
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  return with_errors([&]() -> PyObject* {
    if (PyList_GET_SIZE(expected) != count) return list_of_grads(tensors);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* grad = PyList_GET_ITEM(expected, i);
      const at::Tensor& found = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
      const bool is_same = grad == Py_None ? !found.defined()
                                           : THPVariable_Check(grad) && found.is_same(THPVariable_Unpack(grad));
      if (!is_same) return list_of_grads(tensors);
    }
    Py_RETURN_NONE;
  });
}

// set_grads(tensors, grads): sets each tensor's grad; some may be None.
//
// False, with nothing set, if a tensor or its grad is of a subclass, or if they differ in dtype, device or shape.
PyObject* set_grads(PyObject*, PyObject* args) {
  PyObject *tensors, *grads;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &grads)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PyList_GET_SIZE(grads) != count) Py_RETURN_FALSE;
  return with_errors([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject *item = PyList_GET_ITEM(tensors, i), *grad = PyList_GET_ITEM(grads, i);
      if (!is_tensor_or_parameter(item)) Py_RETURN_FALSE;
      if (grad == Py_None) continue;
      if (!is_tensor_or_parameter(grad) || grad == item) Py_RETURN_FALSE;
      const at::Tensor &tensor = THPVariable_Unpack(item), &its = THPVariable_Unpack(grad);
      const bool fits = its.layout() == at::kStrided && tensor.layout() == at::kStrided &&
                        its.scalar_type() == tensor.scalar_type() && its.device() == tensor.device() &&
                        its.sizes() == tensor.sizes();
      if (!fits) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* grad = PyList_GET_ITEM(grads, i);
      at::Tensor tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
      tensor.mutable_grad() = grad == Py_None ? at::Tensor() : THPVariable_Unpack(grad);
    }
    Py_RETURN_TRUE;
  });
}

// are_plain(gradients): whether each is a torch.Tensor of no subclass, strided, float32, and on the CPU or meta device.
PyObject* are_plain(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  if (PyList_GET_SIZE(given) == 0) Py_RETURN_FALSE;
  return with_errors([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      if (!THPVariable_CheckExact(item) || Py_TYPE(item) == (PyTypeObject*)ParameterClass) Py_RETURN_FALSE;
      const at::Tensor& tensor = THPVariable_Unpack(item);
      const bool is_here = tensor.is_cpu() || tensor.is_meta();
      if (!is_here || tensor.layout() != at::kStrided || tensor.scalar_type() != at::kFloat) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
  });
}

}  // namespace
