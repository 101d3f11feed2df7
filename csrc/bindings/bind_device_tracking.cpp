#include "bindings/register.h"

#if CPR_EXT_HAS_CUDA
#include "bindings/annotations.h"
#include "bindings/table_view.h"
#include "bindings/vector_array.h"
#include "tracking/cuda/access_counter.h"
#include "tracking/cuda/change_meter.h"
#include "tracking/cuda/dirty_rows.h"
#include "tracking/cuda/row_sampler.h"

namespace py = pybind11;

namespace cpr_ext {

void register_device_tracking(py::module_& module) {
  py::class_<DeviceAccessCounter, RowTracker>(
      module, "DeviceAccessCounter",
      "MFU of a table on a CUDA device: AccessCounter with its counts there. A call that asks for\n"
      "a result waits for the device's stream, the others do not.")
      .def(py::init<std::string, int64_t, int>(), py::kw_only(), py::arg("name"),
           py::arg("num_rows"), py::arg("device"))
      .def(
          "counts",
          [](const DeviceAccessCounter& counter) {
            std::vector<uint32_t> counts;
            {
              py::gil_scoped_release release;
              counts = counter.counts();
            }
            return to_numpy(std::move(counts));
          },
          "Return a copy of the counts: (num_rows) uint32.")
      .def(
          "sum_counts",
          [](const DeviceAccessCounter& counter, int64_t begin, int64_t end) {
            py::gil_scoped_release release;
            return counter.sum_counts({begin, end});
          },
          py::arg("begin"), py::arg("end"), "Return the sum of the counts of rows [begin, end).");
  py::class_<DeviceDirtyRows, RowTracker>(
      module, "DeviceDirtyRows",
      "DirtyRows of a table on a CUDA device. Calls wait as those of DeviceAccessCounter.")
      .def(py::init<std::string, int64_t, int>(), py::kw_only(), py::arg("name"),
           py::arg("num_rows"), py::arg("device"));
  py::class_<DeviceRowSampler, RowTracker>(
      module, "DeviceRowSampler",
      "SSU of a table on a CUDA device: RowSampler with its sample there; two bits per row and\n"
      "twelve bytes per sampled row. Calls wait as those of DeviceAccessCounter.")
      .def(py::init([](std::string name, int64_t num_rows, int64_t capacity, int64_t period,
                       uint64_t seed, int device) {
             return std::make_unique<DeviceRowSampler>(
                 std::move(name), num_rows, SamplerOptions{capacity, period, seed}, device);
           }),
           py::kw_only(), py::arg("name"), py::arg("num_rows"), py::arg("capacity"),
           py::arg("period") = SamplerOptions{}.period, py::arg("seed") = SamplerOptions{}.seed,
           py::arg("device"))
      .def_property_readonly(
          "capacity", [](const DeviceRowSampler& sampler) { return sampler.options().capacity; },
          "Most rows that the sample holds.")
      .def_property_readonly(
          "num_sampled",
          [](const DeviceRowSampler& sampler) {
            py::gil_scoped_release release;
            return sampler.num_sampled();
          },
          "Rows in the sample.");
  py::class_<DeviceChangeMeter, RowTracker>(
      module, "DeviceChangeMeter",
      "SCAR of a table on a CUDA device: ChangeMeter with its copy of the weight there. Calls "
      "wait\n"
      "as those of DeviceAccessCounter; a selection raises NanError when it is read.")
      .def(py::init([](std::string name, const ArrayLike& weight, int device) {
             const WeightView view = view_weight(weight, name, checked_device(device));
             return std::make_unique<DeviceChangeMeter>(std::move(name), view, device);
           }),
           py::kw_only(), py::arg("name"), py::arg("weight"), py::arg("device"));
}

}  // namespace cpr_ext
#endif
