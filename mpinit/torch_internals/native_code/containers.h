// Lists and dicts of Python objects, such as modules' dicts of parameters, read and changed in one call.

#pragma once

#include <Python.h>

#include "objects.h"

namespace {

// are_as_seen(owners, name, dicts, entries): whether the attribute `name` of each owner is its dict, with the same
// entries.
//
// entries: the keys of all dicts, one dict after another, and then their values in the same order.
PyObject* are_as_seen(PyObject*, PyObject* arguments) {
  PyObject *owners, *name, *dicts, *entries, *key, *value;
  if (!PyArg_ParseTuple(
          arguments, "O!UO!O!", &PyList_Type, &owners, &name, &PyList_Type, &dicts, &PyList_Type, &entries))
    return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(entries) / 2;
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(owners); ++i) {
    // nn.Module.__getattr__ would take longer.
    PyObject *dict = PyObject_GenericGetAttr(PyList_GET_ITEM(owners, i), name), *known = PyList_GetItem(dicts, i);
    if (dict == nullptr || known == nullptr) return nullptr;
    Py_DECREF(dict);
    if (dict != known || !PyDict_Check(dict)) Py_RETURN_FALSE;
    Py_ssize_t at = 0;
    for (; PyDict_Next(dict, &at, &key, &value); ++seen)
      if (seen == count || PyList_GET_ITEM(entries, seen) != key || PyList_GET_ITEM(entries, count + seen) != value)
        Py_RETURN_FALSE;
  }
  return PyBool_FromLong(seen == count);
}

// replace_entries(dicts, names, expected, values): sets an entry of each dict, if all entries are the expected objects.
//
// All arguments are lists. Returns False, with nothing set, if an entry is another object.
PyObject* replace_entries(PyObject*, PyObject* arguments) {
  PyObject *dicts, *names, *expected, *values;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyList_Type, &dicts, &PyList_Type, &names, &PyList_Type, &expected,
                        &PyList_Type, &values))
    return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(dicts);
  if (PyList_GET_SIZE(names) != count || PyList_GET_SIZE(expected) != count || PyList_GET_SIZE(values) != count)
    Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyDict_Check(PyList_GET_ITEM(dicts, i))) Py_RETURN_FALSE;
    PyObject* present = PyDict_GetItemWithError(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(names, i));
    if (present != PyList_GET_ITEM(expected, i)) {
      if (PyErr_Occurred() != nullptr) return nullptr;
      Py_RETURN_FALSE;
    }
  }
  for (Py_ssize_t i = 0; i < count; ++i)
    if (PyDict_SetItem(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(names, i), PyList_GET_ITEM(values, i)) != 0)
      return nullptr;
  Py_RETURN_TRUE;
}

// exchanged(items, others): a copy of a list, in which items are replaced by the values that `others` has for their
// ids.
PyObject* exchanged(PyObject*, PyObject* arguments) {
  PyObject *items, *others;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &items, &PyDict_Type, &others)) return nullptr;
  PyObject* found = PyList_New(PyList_GET_SIZE(items));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items) && found != nullptr; ++i) {
    PyObject* item = PyList_GET_ITEM(items, i);
    Object key(PyLong_FromVoidPtr(item));
    PyObject* other = key.held == nullptr ? nullptr : PyDict_GetItemWithError(others, key.held);
    if (PyErr_Occurred() != nullptr) Py_CLEAR(found);
    else PyList_SET_ITEM(found, i, Py_NewRef(other == nullptr ? item : other));
  }
  return found;
}

}  // namespace
