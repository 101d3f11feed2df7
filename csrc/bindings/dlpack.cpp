#include "bindings/dlpack.h"

#include "core/device_stream.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

// The layout that DLPack 1.x promises: https://dmlc.github.io/dlpack/latest/c_api.html
constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpuDevice = 1;
constexpr int32_t kCudaDevice = 2;
constexpr uint8_t kSignedInteger = 0;

struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
static_assert(sizeof(void*) != 8 || sizeof(DlTensor) == 48);

// Borrows: what it fills is the tensor's. Returns 0, or -1 with a Python error set.
using ViewTensor = int (*)(void* object, DlTensor* view);

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  const ExchangeApi* older;
  void* allocate;
  void* share;
  void* import;
  ViewTensor view;  // may be null
  void* stream;
};

ViewTensor find_api(PyObject* tensor_class) {
  PyObject* capsule = PyObject_GetAttrString(tensor_class, "__dlpack_c_exchange_api__");
  ViewTensor found = nullptr;
  if (capsule != nullptr) {
    const void* pointer = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    auto api = static_cast<const ExchangeApi*>(pointer);
    while (api != nullptr && api->major_version != kMajorVersion) api = api->older;
    if (api != nullptr) found = api->view;
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  return found;
}

bool is_used = true;  // guarded by the GIL

struct Torch {
  PyObject* tensor_class = nullptr;  // none: torch is not imported yet
  ViewTensor view = nullptr;
};

// Guarded by the GIL.
const Torch& find_torch() {
  static Torch torch;
  if (torch.tensor_class != nullptr) return torch;
  PyObject* name = PyUnicode_InternFromString("torch");
  PyObject* module = PyImport_GetModule(name);
  Py_DECREF(name);
  if (module != nullptr) {
    torch.tensor_class = PyObject_GetAttrString(module, "Tensor");  // kept: torch stays
    Py_DECREF(module);
    if (torch.tensor_class != nullptr) torch.view = find_api(torch.tensor_class);
  }
  PyErr_Clear();
  return torch;
}

}  // namespace

int64_t DlpackView::numel() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

bool DlpackView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int i = ndim; i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

bool view_dlpack(py::handle object, DlpackView* view) {
  const Torch& torch = find_torch();
  if (torch.view == nullptr || !is_used) return false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != torch.tensor_class) return false;
  DlTensor tensor{};
  if (torch.view(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.ndim > 0 && (tensor.shape == nullptr || tensor.strides == nullptr)) return false;
  if (tensor.device_type == kCpuDevice) {
    view->memory = kHostMemory;
  } else if (tensor.device_type == kCudaDevice) {
    view->memory = tensor.device_id;
  } else {
    return false;
  }
  view->dtype = DType::kOther;
  if (tensor.type_code == kSignedInteger && tensor.type_lanes == 1) {
    if (tensor.type_bits == 32) view->dtype = DType::kInt32;
    if (tensor.type_bits == 64) view->dtype = DType::kInt64;
  }
  view->ndim = tensor.ndim;
  view->shape = tensor.shape;
  view->strides = tensor.strides;
  if (tensor.data == nullptr && view->numel() != 0) return false;  // a wrapper of tensors
  view->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return true;
}

bool use_dlpack(bool use) {
  is_used = use;
  return use && find_torch().view != nullptr;
}

}  // namespace cpr_ext
