// Python's objects, and questions about the tensors among them.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <utility>
#include <vector>

namespace {

// Fewer numbers than these are not divided among threads.
constexpr int64_t GRAIN = 32768;

// Owns one reference to a Python object, or none.
struct Object {
  PyObject* held;
  explicit Object(PyObject* made) : held(made) {}
  Object(const Object&) = delete;
  ~Object() { Py_XDECREF(held); }
};

// Returns the Python string of one of the names below; each is made once.
PyObject* named(const char* name) {
  static std::vector<std::pair<const char*, PyObject*>> known;
  for (const auto& [text, made] : known)
    if (text == name) return made;
  known.emplace_back(name, PyUnicode_InternFromString(name));
  return known.back().second;
}

// Names of attributes of masters and encoded tensors, and of the entries of an optimizer's state.
constexpr const char CODES[] = "codes", STRIDES[] = "strides", REMAINDER[] = "remainder", PARAMETER[] = "parameter",
                     CLAMPS[] = "clamps", STEP[] = "step", FIRST[] = "exp_avg", SECOND[] = "exp_avg_sq",
                     MOMENTUM[] = "momentum_buffer", ADDRESS[] = "address";

// Returns an attribute of an object; nullptr, without a Python error, if it has none of this name.
PyObject* attribute(PyObject* owner, const char* name) {
  PyObject* found = PyObject_GetAttr(owner, named(name));
  if (found == nullptr) PyErr_Clear();
  return found;
}

// Releases the GIL while it exists.
struct ReleasedGil {
  PyThreadState* state = PyEval_SaveThread();
  ~ReleasedGil() { PyEval_RestoreThread(state); }
};

// Whether a tensor is strided, on the CPU and of this dtype, and its memory has its numbers as they are.
bool is_plain(const at::Tensor& t, at::ScalarType dtype) {
  return t.defined() && t.device().is_cpu() && t.layout() == at::kStrided && t.scalar_type() == dtype &&
      !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_inference() && !t.is_neg();
}

// Whether an object is a torch.Tensor or nn.Parameter, and of no subclass of these.
bool is_tensor_or_parameter(PyObject* item) {
  return Py_TYPE(item) == (PyTypeObject*)ParameterClass || THPVariable_CheckExact(item);
}

bool has_layout_of(const at::Tensor& t, const at::Tensor& other) {
  return t.sizes() == other.sizes() && t.strides() == other.strides();
}

// Calls a function, and raises a C++ exception as Python's RuntimeError.
template <class Function>
PyObject* with_errors(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace
