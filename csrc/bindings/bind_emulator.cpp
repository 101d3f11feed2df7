// What tests set on the emulated device; only in the module that is built for them.
#include <pybind11/stl.h>

#include <new>
#include <string>
#include <utility>

#include "bindings/register.h"
#include "testing/broken_kernels.h"
#include "testing/emulated_device.h"
#include "tracking/row_tracker.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

// On the host; every lookup of it runs out of memory.
class FailingTracker final : public RowTracker {
 public:
  using RowTracker::RowTracker;
  const char* kind() const override { return "FailingTracker"; }
  int64_t memory_bytes() const override { return 0; }
  void observe(const Lookup&) override { throw std::bad_alloc(); }

 private:
  int64_t count_dirty(RowRange) const override { return 0; }
  bool has_no_dirty(RowRange) const override { return true; }
  RowIdVector list_dirty(RowRange) const override { return {}; }
  RowIdVector select_best(RowRange, int64_t, const WeightView*, ThreadPool*) const override {
    return {};
  }
  TakenRows clear_rows(RowIds, const WeightView*, ThreadPool*) override { return nothing_taken(); }
  TakenRows clear_range(RowRange, const WeightView*, ThreadPool*) override {
    return nothing_taken();
  }
  void restore(const TakenRows&) override {}
};

}  // namespace

void register_emulator(py::module_& module) {
  py::module_ emulator = module.def_submodule("emulator", "The emulated CUDA device.");
  py::class_<FailingTracker, RowTracker>(emulator, "FailingTracker",
                                         "A tracker on the host that cannot count a lookup.")
      .def(py::init<std::string, int64_t>(), py::kw_only(), py::arg("name"), py::arg("num_rows"));
  emulator.def("set_lazy", &emulated_cuda::set_lazy, py::arg("lazy"),
               "Streams run only when somebody waits for them.");
  emulator.def("set_capturing", &emulated_cuda::set_capturing, py::arg("capturing"),
               "Streams say that a graph is made of them; what is submitted runs nevertheless.");
  emulator.def("shuffle_threads", &emulated_cuda::shuffle_threads, py::arg("seed"),
               "Blocks and their threads run in a random order; 0: in theirs.");
  emulator.def(
      "fail_call",
      [](const std::string& name, int nth, int error) {
        emulated_cuda::fail_call(name, nth, static_cast<cudaError_t>(error));
      },
      py::arg("name"), py::arg("nth"), py::arg("error") = 2,
      "The nth call of this function from here on fails (2: out of memory); 0: none does.");
  emulator.def(
      "run_broken_kernel",
      [](const std::string& fault) {
        return static_cast<int>(emulated_cuda::run_broken_kernel(fault));
      },
      py::arg("fault"), "The error that a kernel with this fault ends with; 0: none.");
  emulator.def("calls", &emulated_cuda::calls, "Calls by name since last asked.");
  emulator.def("allocations", &emulated_cuda::allocations,
               "Device memory that is not freed: bytes by address. Runs what waits.");
  emulator.def(
      "submit_fill",
      [](uintptr_t address, int value, int64_t bytes) {
        cudaMemsetAsync(reinterpret_cast<void*>(address), value, static_cast<size_t>(bytes),
                        nullptr);
      },
      py::arg("address"), py::arg("value"), py::arg("bytes"),
      "As an optimizer would: changes memory when the default stream gets here.");
}

}  // namespace cpr_ext
