// What tests set on the emulated device; only in the module that is built for them.
#include <pybind11/stl.h>

#include <new>
#include <string>
#include <utility>

#include "bindings/register.h"
#include "bindings/tensor_view.h"
#include "testing/broken_uses.h"
#include "testing/emulated_device.h"
#include "testing/emulated_memory.h"
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

void register_broken_uses(py::module_& emulator) {
  using namespace emulated_cuda;  // NOLINT: these are its functions
  const std::pair<const char*, int (*)(const std::string&)> mistakes[] = {
      {"call_in_capture", call_in_capture}, {"relaxed_call_in_capture", relaxed_call_in_capture},
      {"mix_devices", mix_devices},         {"call_wrongly", call_wrongly},
      {"see_host_memory", see_host_memory}, {"run_broken_kernel", run_broken_kernel}};
  for (const auto& [name, make] : mistakes) {
    emulator.def(name, make, py::arg("fault"), "See testing/broken_uses.h, as of all below.");
  }
  emulator.def("wait_beside_capture", &wait_beside_capture, py::arg("waits_beside"));
  emulator.def("count_mappings", &count_mappings, py::arg("times"), py::arg("keeps"));
  emulator.def("read_freed", &read_freed, py::arg("frees_late"), py::arg("has_next"));
  emulator.def("sum_shared", &sum_shared, py::arg("clears"));
  emulator.def("overrun_memory", &overrun_memory, py::arg("num_elements"), py::arg("num_more"));
  emulator.def("misread_sums", &misread_sums, py::arg("waits"));
}

}  // namespace

void register_emulator(py::module_& module) {
  py::module_ emulator = module.def_submodule("emulator", "The emulated CUDA device.");
  py::class_<FailingTracker, RowTracker>(emulator, "FailingTracker",
                                         "A tracker on the host that cannot count a lookup.")
      .def(py::init<std::string, int64_t>(), py::kw_only(), py::arg("name"), py::arg("num_rows"));
  emulator.def("set_lazy", &emulated_cuda::set_lazy, py::arg("lazy"),
               "Streams run only when somebody waits for them.");
  emulator.def("set_capturing", &emulated_cuda::set_capturing, py::arg("capturing"),
               "The default stream begins to capture a graph, or ends; what it is given then runs\n"
               "when the graph is replayed. Returns False if a call has broken the graph.");
  emulator.def("replay_graph", &emulated_cuda::replay_graph, "Launch the graph captured last.");
  emulator.def("set_num_devices", &emulated_cuda::set_num_devices, py::arg("num_devices"),
               "There are this many devices, none of which is in use yet.");
  emulator.def("set_device", &emulated_cuda::set_device, py::arg("device"),
               "Choose this thread's device.");
  emulator.def("current_context", &emulated_cuda::current_context,
               "The device of this thread's context; -1: it has none.");
  emulator.def("unload_kernels", &emulated_cuda::unload_kernels,
               "No kernel has run yet, as in a new process.");
  emulator.def("set_memory_pools", &emulated_cuda::set_memory_pools, py::arg("has_pools"),
               "Devices that are used from here on have memory pools, or not.");
  emulator.def("set_free_part", &emulated_cuda::set_free_part, py::arg("part"),
               "The part of its memory that a device says is free.");
  emulator.def(
      "make_stream", [] { return reinterpret_cast<uintptr_t>(emulated_cuda::make_stream()); },
      "Make a stream beside the default one; its number, as torch has it.");
  emulator.def(
      "destroy_stream",
      [](uintptr_t stream) {
        emulated_cuda::destroy_stream(reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("stream"), "Destroy it, once its work is done.");
  emulator.def("set_strict", &set_strict_memory, py::arg("strict"),
               "Take only tensors that say they are on the device for its memory, as a GPU does.");
  emulator.def("used_devices", &emulated_cuda::used_devices,
               "Devices that have a context: they were a thread's when it called CUDA.");
  emulator.def("synchronize", &emulated_cuda::synchronize, "Wait for the device, as torch does.");
  emulator.def("num_waiting", &emulated_cuda::num_waiting, "Work submitted and not yet run.");
  emulator.def("mappings", &emulated_cuda::mappings,
               "How often pools have taken memory from the device since last asked.");
  emulator.def("pooled_bytes", &emulated_cuda::pooled_bytes, "Bytes that pools hold, used or not.");
  emulator.def("shared_bytes", &emulated_cuda::shared_bytes, "Shared memory of all kernels.");
  emulator.def(
      "wide_loads", [] { return emulated_cuda::wide_loads(); },
      "Loads of 16 bytes that kernels have made so far.");
  register_broken_uses(emulator);
  emulator.def("shuffle_threads", &emulated_cuda::shuffle_threads, py::arg("seed"),
               "Blocks and their threads run in a random order; 0: in theirs.");
  emulator.def(
      "fail_call",
      [](const std::string& name, int nth, int error) {
        emulated_cuda::fail_call(name, nth, static_cast<cudaError_t>(error));
      },
      py::arg("name"), py::arg("nth"), py::arg("error") = 2,
      "The nth call of this function from here on fails (2: out of memory); 0: none does.");
  emulator.def("calls", &emulated_cuda::calls, "Calls by name since last asked.");
  emulator.def("own_calls", &emulated_cuda::own_calls,
               "Calls of this thread by name since last asked.");
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
