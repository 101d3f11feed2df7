// Python attributes read with the fewest calls: for what runs once per table and step.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace cpr_ext {

// As Python strings made once; they live as long as the process.
struct AttributeNames {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* indices = PyUnicode_InternFromString("_indices");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* nnz = PyUnicode_InternFromString("_nnz");
  PyObject* num_embeddings = PyUnicode_InternFromString("num_embeddings");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* optimizer = PyUnicode_InternFromString("optimizer");
  PyObject* state = PyUnicode_InternFromString("state");
  PyObject* values = PyUnicode_InternFromString("values");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* weight = PyUnicode_InternFromString("weight");
};

inline const AttributeNames& names() {
  static const AttributeNames* const names = new AttributeNames;
  return *names;
}

inline pybind11::object attribute(pybind11::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

inline pybind11::object call(pybind11::handle object, PyObject* method) {
  PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

inline int64_t to_int64(const pybind11::object& number) {
  const int64_t value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

}  // namespace cpr_ext
