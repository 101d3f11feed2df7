// How the path of a file crosses: any bytes, as Python's os.fsencode and os.fsdecode have them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <string>

namespace cpr_ext {

// Text that may hold a path, for Python: a path need not be UTF-8.
inline pybind11::str text_of(const std::string& text) {
  PyObject* decoded =
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

// The way back. What is no path is escaped: it is for people to read.
inline std::string text_from(const pybind11::str& text) {
  PyObject* encoded = PyUnicode_EncodeFSDefault(text.ptr());
  if (encoded == nullptr) {
    PyErr_Clear();
    encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  }
  if (encoded == nullptr) throw pybind11::error_already_set();
  return std::string(pybind11::reinterpret_steal<pybind11::bytes>(encoded));
}

}  // namespace cpr_ext
