// Types that signatures show to Python, and that tools/native_stub.py writes to cpr_ext/_C.pyi. At
// run time each is the object or the sequence that it derives from; who takes one checks it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

namespace cpr_ext {

inline bool is_any_object(PyObject*) { return true; }

// What view_tensor() reads, on any device.
class ArrayLike : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(ArrayLike, object, is_any_object)
};

class Tensor : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(Tensor, object, is_any_object)
};

// A cpr_ext.Table, which this module does not know.
class AnyTable : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(AnyTable, object, is_any_object)
};

template <class T>
class SequenceOf : public pybind11::sequence {
  using pybind11::sequence::sequence;
};

using TensorList = pybind11::typing::List<Tensor>;

// The parameter groups of a torch optimizer.
using ParameterGroups =
    pybind11::typing::List<pybind11::typing::Dict<pybind11::str, pybind11::object>>;

}  // namespace cpr_ext

namespace pybind11::detail {

template <>
struct handle_type_name<cpr_ext::ArrayLike> {
  static constexpr auto name = const_name("torch.Tensor | numpy.typing.NDArray[typing.Any]");
};

template <>
struct handle_type_name<cpr_ext::Tensor> {
  static constexpr auto name = const_name("torch.Tensor");
};

template <>
struct handle_type_name<cpr_ext::AnyTable> {
  static constexpr auto name = const_name("typing.Any");
};

template <class T>
struct handle_type_name<cpr_ext::SequenceOf<T>> {
  static constexpr auto name =
      const_name("collections.abc.Sequence[") + make_caster<T>::name + const_name("]");
};

}  // namespace pybind11::detail
