// Each function adds the names of a room, or of a part of one, to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace cpr_ext {

void register_tracking(pybind11::module_& module);
void register_scrub(pybind11::module_& module);
void register_gradients(pybind11::module_& module);
void register_versions(pybind11::module_& module);
void register_selection(pybind11::module_& module);
void register_staging(pybind11::module_& module);
void register_segment_table(pybind11::module_& module);
void register_pipeline(pybind11::module_& module);
void register_restore(pybind11::module_& module);
void register_parity(pybind11::module_& module);
void register_device(pybind11::module_& module);
void register_device_tracking(pybind11::module_& module);  // of builds with CUDA
#ifdef CPR_EXT_EMULATED_DEVICE
void register_emulator(pybind11::module_& module);
#endif

}  // namespace cpr_ext
