#include "core/cuda/host_link.h"
#include "tracking/cuda/taken_rows.h"

namespace cpr_ext {

DeviceTakenRows::DeviceTakenRows(int device, std::vector<int64_t> row_ids, RowRange range,
                                 const TakenCodec& codec, cudaStream_t stream)
    : device_(device),
      row_ids_(std::move(row_ids)),
      range_(range),
      codec_(codec),
      stream_(stream),
      values_(num_rows() * static_cast<int64_t>(sizeof(uint32_t)), stream) {}

int64_t DeviceTakenRows::num_rows() const {
  return row_ids_.empty() ? range_.size() : static_cast<int64_t>(row_ids_.size());
}

void DeviceTakenRows::read(TakenRows* taken) {
  const DeviceGuard guard(device_);
  std::vector<uint32_t> values(static_cast<size_t>(num_rows()));
  HostLink::of(device_).download(values.data(), values_.as<uint32_t>(),
                                 num_rows() * static_cast<int64_t>(sizeof(uint32_t)), stream_);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) continue;
    taken->row_ids.push_back(row_ids_.empty() ? range_.begin + static_cast<int64_t>(i)
                                              : row_ids_[i]);
    codec_.decode(taken, values[i]);
  }
}

}  // namespace cpr_ext
