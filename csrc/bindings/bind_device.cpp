#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "bindings/vector_array.h"
#include "core/device_stream.h"
#include "core/error.h"
#include "staging/device_stager.h"
#include "tracking/row_tracker.h"

#if CPR_EXT_HAS_CUDA
#include "selection/cuda/top_rows.h"
#include "staging/cuda/row_copy.h"
#endif

namespace py = pybind11;

namespace cpr_ext {

#if CPR_EXT_HAS_CUDA

namespace {

void gather_chosen(const SequenceOf<ArrayLike>& tables, const std::shared_ptr<PendingRows>& chosen,
                   const SequenceOf<ArrayLike>& outs) {
  if (!chosen || chosen->chooser == nullptr) throw UsageError("no rows were chosen");
  if (tables.size() != outs.size()) throw UsageError("one array of outs per table is needed");
  const int device = chosen->chooser->device();
  const int64_t count = chosen->num_rows();
  std::vector<RowArray> arrays;
  std::vector<std::byte*> packed;
  for (size_t i = 0; i < tables.size(); ++i) {
    arrays.push_back(view_rows(tables[i], "table", 0, device));
    if (arrays.back().num_rows < chosen->chooser->num_rows()) {
      throw UsageError("the rows were chosen of " + std::to_string(chosen->chooser->num_rows()) +
                       "; an array of the table has " + std::to_string(arrays.back().num_rows));
    }
    const TensorView out = view_tensor(outs[i], "out", device);
    const int64_t needed = count * arrays.back().row_bytes;
    if (!out.writable || !out.is_contiguous() || out.numel() * out.item_bytes != needed) {
      throw UsageError("out must be contiguous and hold " + std::to_string(count) + " rows of " +
                       std::to_string(arrays.back().row_bytes) + " bytes");
    }
    packed.push_back(static_cast<std::byte*>(out.data));
  }
  py::gil_scoped_release release;
  gather_on_device(device, arrays, chosen->ids_on_device(), count, packed);
}

py::array_t<int64_t> device_top_rows_of(const ArrayLike& scores, int64_t k, int device) {
  const TensorView view = view_contiguous(scores, "scores", 1, {DType::kUInt32}, device);
  RowIdVector row_ids;
  {
    py::gil_scoped_release release;
    row_ids = device_top_rows(device, static_cast<const uint32_t*>(view.data), view.shape[0], k);
  }
  return to_numpy(std::move(row_ids));
}

void reclaim_memory_by(const py::typing::Callable<bool(int)>& reclaim) {
  auto* const call = new py::function(reclaim);  // threads may outlive the module
  set_memory_reclaimer([call](int device) {
    const py::gil_scoped_acquire gil;
    try {
      return (*call)(device).cast<bool>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a memory reclaimer");
      return false;
    }
  });
}

void register_stager(py::module_& module) {
  py::class_<DeviceStager, std::shared_ptr<DeviceStager>>(
      module, "DeviceStager",
      "Rows of tables on a CUDA device into staging slots and back, in the order of its stream.")
      .def(py::init([](int device, int64_t slot_bytes, int num_slots) {
             return make_device_stager(device, slot_bytes, num_slots);
           }),
           py::kw_only(), py::arg("device"), py::arg("slot_bytes"), py::arg("num_slots"))
      .def_property_readonly("device", &DeviceStager::device, "Number of its CUDA device.")
      .def_property_readonly(
          "slot_bytes", &DeviceStager::buffer_bytes,
          "Bytes of a buffer: the requested number, or fewer if the device was short of memory.")
      .def("settle", &DeviceStager::settle, py::call_guard<py::gil_scoped_release>(),
           "Have packed tables captured beside the stream: once it has got here, where their rows\n"
           "are, which nothing changes any more.");
}

}  // namespace

void register_device(py::module_& module) {
  module.attr("has_cuda") = true;
  module.def("num_devices", &num_devices, "Count the usable CUDA devices; 0 without a driver.");
  module.def(
      "use_stream",
      [](int device, uintptr_t stream) {
        set_current_stream(device, reinterpret_cast<void*>(stream));
      },
      py::arg("device"), py::arg("stream"),
      "Submit this thread's later work on the device to this stream (a cudaStream_t as a\n"
      "number), the one that it trains on. It comes after all that was submitted to the\n"
      "stream before, which must still exist.");
  module.def("set_memory_reclaimer", &reclaim_memory_by, py::arg("reclaim"),
             "Have reclaim(device) called when a device is out of memory, on any thread. It frees\n"
             "what others only keep for later, and returns whether it did.");
  module.def("trim_memory", &trim_memory, py::arg("device"),
             py::call_guard<py::gil_scoped_release>(),
             "Give memory of the device that is kept for later back to other allocators.");
  module.def("trim_memory_if_short", &trim_memory_if_short, py::arg("device"),
             py::call_guard<py::gil_scoped_release>(),
             "Do so if little of the device's memory is free.");
  py::class_<StreamMark>(
      module, "StreamMark",
      "A place in the stream that this thread trains on: behind all that it has\n"
      "submitted to the device.")
      .def(py::init(&mark_stream), py::kw_only(), py::arg("device"))
      .def("is_passed", &StreamMark::is_passed, "Return whether the stream has got there.")
      .def("wait", &StreamMark::wait, py::call_guard<py::gil_scoped_release>(),
           "Wait until it has.");
  register_stager(module);
  module.def(
      "gather_chosen", &gather_chosen, py::kw_only(), py::arg("tables"), py::arg("chosen"),
      py::arg("outs"),
      "Pack the chosen rows of arrays of a table, as they are now in training's stream, into\n"
      "outs[i] (n, ...) on the same device. Does not wait; all arguments stay until it is\n"
      "done.\n\n"
      "chosen: what begin_select of the table's tracker returned, and read() has been\n"
      "called.");
  register_device_tracking(module);
  module.def("device_top_rows", &device_top_rows_of, py::arg("scores"), py::arg("k"), py::kw_only(),
             py::arg("device"),
             "Select as top_rows, of scores (num_rows) uint32 on a CUDA device.");
}

#else

void register_device(py::module_& module) {
  module.attr("has_cuda") = false;
  module.def(
      "num_devices", [] { return 0; },
      "Count the usable CUDA devices: none, as this build has no CUDA.");
  py::class_<DeviceStager, std::shared_ptr<DeviceStager>>(module, "DeviceStager",
                                                          "Of a build with CUDA.");
}

#endif

}  // namespace cpr_ext
