// The compiled module cpr_ext._C: one register_* function per room, and the mapping of the core's
// exceptions onto cpr_ext.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/path_view.h"
#include "bindings/register.h"
#include "core/error.h"
#include "core/instruction_set.h"
#include "core/process.h"
#include "core/thread_pool.h"

namespace py = pybind11;

namespace cpr_ext {
namespace {

void raise_as(const char* name, const char* message) {
  const py::object type = py::module_::import("cpr_ext.errors").attr(name);
  PyErr_SetObject(type.ptr(), text_of(message).ptr());
}

void register_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const RowIndexError& error) {
      raise_as("RowIndexError", error.what());
    } catch (const UsageError& error) {
      raise_as("UsageError", error.what());
    } catch (const NanError& error) {
      raise_as("NanError", error.what());
    } catch (const CudaError& error) {
      raise_as("CudaError", error.what());
    } catch (const StorageError& error) {
      const py::object type = py::module_::import("cpr_ext.errors").attr("StorageError");
      const py::object value = type(error.code(), text_of(error.what()), text_of(error.path()));
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

void register_core(py::module_& module) {
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(
      module, "ThreadPool", "Threads shared by the native operations; the caller counts as one.")
      .def(py::init([](int num_threads) {
             return std::shared_ptr<ThreadPool>(new ThreadPool(num_threads), DeleteInCreator());
           }),
           py::kw_only(), py::arg("num_threads"))
      .def_property_readonly("num_threads", &ThreadPool::num_threads, "With the caller.");
  module.def("instruction_sets", &instruction_sets,
             "List the instruction sets that this CPU has kernels for, the best one last.");
  module.def(
      "instruction_set", [] { return name_of(instruction_set()); }, "Return the one in use.");
  module.def("use_instruction_set", &use_instruction_set, py::arg("name"),
             "Choose one, for tests and measurements. Raises UsageError where this CPU lacks it.");
}

}  // namespace
}  // namespace cpr_ext

PYBIND11_MODULE(CPR_EXT_MODULE, module) {
  module.doc() = "Native core of cpr_ext. Private: import it through cpr_ext._native only.";
  cpr_ext::register_errors();
  cpr_ext::register_core(module);
  cpr_ext::register_tracking(module);
  cpr_ext::register_scrub(module);
  cpr_ext::register_gradients(module);
  cpr_ext::register_versions(module);
  cpr_ext::register_selection(module);
  cpr_ext::register_device(module);
  cpr_ext::register_staging(module);
  cpr_ext::register_segment_table(module);
  cpr_ext::register_pipeline(module);
  cpr_ext::register_restore(module);
  cpr_ext::register_parity(module);
#ifdef CPR_EXT_EMULATED_DEVICE
  cpr_ext::register_emulator(module);
#endif
}
