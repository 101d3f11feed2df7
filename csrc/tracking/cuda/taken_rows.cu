#include "core/cuda/host_link.h"
#include "tracking/cuda/taken_rows.h"

namespace cpr_ext {

DeviceTakenRows::DeviceTakenRows(int device, RowNames names, const TakenCodec& codec,
                                 cudaStream_t stream)
    : device_(device),
      names_(std::move(names)),
      codec_(codec),
      stream_(stream),
      values_(names_.size() * static_cast<int64_t>(sizeof(uint32_t)), stream) {}

void DeviceTakenRows::read(TakenRows* taken) {
  const DeviceGuard guard(device_);
  HostLink& link = HostLink::of(device_);
  std::vector<uint32_t> values(static_cast<size_t>(names_.size()));
  link.download(values.data(), values_.as<uint32_t>(),
                names_.size() * static_cast<int64_t>(sizeof(uint32_t)), stream_);
  std::vector<int64_t> row_ids = names_.row_ids;
  if (names_.chosen.all) {
    row_ids.resize(values.size());
    link.download(row_ids.data(), names_.chosen.all->ids_on_device() + names_.chosen.first,
                  names_.chosen.count * static_cast<int64_t>(sizeof(int64_t)), stream_);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) continue;
    taken->row_ids.push_back(row_ids.empty() ? names_.range.begin + static_cast<int64_t>(i)
                                             : row_ids[i]);
    codec_.decode(taken, values[i]);
  }
}

}  // namespace cpr_ext
