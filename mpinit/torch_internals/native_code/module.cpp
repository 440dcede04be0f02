// Native code for CPUs: a Python module of functions that do in one call what takes many operations of torch.
//
// Each function has the bits of these operations, which are its specification, and returns None, False or -1 with
// nothing changed where only torch can do the work. `mpinit build-native` compiles this file, which includes all
// others, with -ffp-contract=off.

#include <Python.h>

#include "casts.h"
#include "codecs.h"
#include "containers.h"
#include "step.h"
#include "tensors.h"
#include "values.h"

namespace {

PyMethodDef methods[] = {
    {"are_plain", are_plain, METH_O, nullptr},
    {"grads", grads, METH_O, nullptr},
    {"changed_grads", changed_grads, METH_VARARGS, nullptr},
    {"set_grads", set_grads, METH_VARARGS, nullptr},
    {"are_as_seen", are_as_seen, METH_VARARGS, nullptr},
    {"replace_entries", replace_entries, METH_VARARGS, nullptr},
    {"exchanged", exchanged, METH_VARARGS, nullptr},
    {"versions", versions, METH_O, nullptr},
    {"changed_versions", changed_versions, METH_VARARGS, nullptr},
    {"set_data", set_data, METH_VARARGS, nullptr},
    {"layouts", layouts, METH_O, nullptr},
    {"are_bare", are_bare, METH_O, nullptr},
    {"concatenated", concatenated, METH_O, nullptr},
    {"casts", casts, METH_VARARGS, nullptr},
    {"step", step, METH_VARARGS, nullptr},
    {"are_finite", are_finite, METH_O, nullptr},
    {"multiply", multiply, METH_VARARGS, nullptr},
    {"joined", joined, METH_VARARGS, nullptr},
    {"differing", differing, METH_VARARGS, nullptr},
    {"encode", encode, METH_VARARGS, nullptr},
    {"decode", decode, METH_VARARGS, nullptr},
    {"round", round, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "mpinit_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_mpinit_native() {
  return PyModule_Create(&module);
}
