#include <utility>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/error.h"
#include "tracking/cuda/change_meter.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/lookups.h"
#include "tracking/cuda/pending_rows.h"
#include "tracking/cuda/row_change.h"
#include "tracking/cuda/row_list.h"

namespace cpr_ext {

namespace {

using RowNumber = unsigned long long;
constexpr RowNumber kNoRow = ~RowNumber{0};

// What kernels know of a meter and of the weight as it is now.
struct Measured {
  const std::byte* weight;
  int64_t stride_bytes;
  std::byte* baseline;  // (num_rows, row_bytes), the rows when last taken
  int64_t embedding_dim;
  uint32_t* dirty;  // bits
  float* carried;   // (num_rows), given back by failed saves; only dirty rows

  template <class Format>
  __device__ std::byte* baseline_row(int64_t row) const {
    return baseline + row * embedding_dim * static_cast<int64_t>(sizeof(typename Format::Stored));
  }

  // The score of a row, zero if it is not dirty. All lanes of a warp call it; `row` below zero:
  // none.
  template <class Format>
  __device__ float score(int64_t row) const {
    const bool is_dirty = row >= 0 && is_bit_set(dirty, row);
    if (!__any_sync(kAllLanes, is_dirty)) return 0;
    const int64_t from = is_dirty ? row : 0;
    float change = row_change_of_lanes<Format>(
        weight + from * stride_bytes, baseline_row<Format>(from), is_dirty ? embedding_dim : 0);
    if (!is_dirty) return 0;
    change += carried[row];
    return change < kSmallestChange ? kSmallestChange : change;  // keeps NaN
  }

  // All lanes of the row call it.
  template <class Format>
  __device__ void rebase(int64_t row) const {
    using Stored = typename Format::Stored;
    const auto* from = reinterpret_cast<const Stored*>(weight + row * stride_bytes);
    auto* const to = reinterpret_cast<Stored*>(baseline_row<Format>(row));
    for (int64_t i = lane_of_row(); i < embedding_dim; i += kLanesPerRow) to[i] = from[i];
  }
};

// Scores are above zero and no NaN, so that their bits order as they do. lowest_nan: a row with
// NaN.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    measure_kernel(Measured measured, RowList rows, uint32_t* scores, RowNumber* lowest_nan) {
  const int64_t i = row_of_grid();
  const int64_t row = i < rows.size ? rows.row(i) : -1;
  const float score = measured.score<Format>(row);
  if (row < 0 || lane_of_row() != 0) return;
  scores[i] = bits_of(score);
  if (score != score) atomicMin(lowest_nan, static_cast<RowNumber>(row));
}

// A row that holds NaN is not taken: it stays dirty, and so does its baseline.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    take_measured_kernel(Measured measured, RowList rows, uint32_t* taken) {
  const int64_t i = row_of_grid();
  const int64_t row = i < rows.size ? rows.row(i) : -1;
  const float score = measured.score<Format>(row);
  __syncwarp();  // all lanes have read what the first one clears
  if (row < 0) return;
  const bool is_nan = score != score;
  if (!is_nan) measured.rebase<Format>(row);
  if (lane_of_row() != 0) return;
  taken[i] = is_nan ? 0 : bits_of(score);
  if (taken[i] == 0) return;
  clear_bit(measured.dirty, row);
  measured.carried[row] = 0;
}

__global__ void __launch_bounds__(kThreads)
    put_back_measured_kernel(uint32_t* dirty, float* carried, RowList rows, const uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  set_bit(dirty, rows.row(i));
  carried[rows.row(i)] += float_of(taken[i]);
}

template <class Format>
__global__ void __launch_bounds__(kThreads) rebase_kernel(Measured measured, RowList rows) {
  const int64_t i = row_of_grid();
  if (i < rows.size) measured.rebase<Format>(rows.row(i));
}

// Rows whose scores are being measured, and chosen by them.
class MeasuredRows final : public PendingRows {
 public:
  MeasuredRows(int device, int64_t num_scores, const MeasuredWeight& weight)
      : device_(device),
        stream_(stream_of(device)),
        weight_(weight),
        scores_(num_scores * static_cast<int64_t>(sizeof(uint32_t)), stream_),
        lowest_nan_(sizeof(RowNumber), stream_) {
    CPR_EXT_CUDA(cudaMemsetAsync(lowest_nan_.as<void>(), 0xff, sizeof(RowNumber), stream_));
  }

  uint32_t* scores() const { return scores_.as<uint32_t>(); }
  RowNumber* lowest_nan() const { return lowest_nan_.as<RowNumber>(); }

  // Once the scores have been launched.
  void choose(RowRange range, int64_t k) {
    measured_.record(stream_);
    rows_ = std::make_unique<DevicePendingRows>(device_, StoredScores{scores()}, range, k);
    scores_ = StreamMemory();
    early_.begin(device_, lowest_nan(), sizeof(RowNumber), measured_);
  }

  bool is_ready() override {
    return rows_->is_ready() && (!early_.is_begun() || early_.has_arrived());
  }
  int64_t num_rows() const override { return rows_->num_rows(); }
  const int64_t* ids_on_device() const override { return rows_->ids_on_device(); }

  RowIdVector read() override {
    RowIdVector row_ids = rows_->read();
    const DeviceGuard guard(device_);
    RowNumber lowest_nan = kNoRow;
    if (early_.is_begun()) {
      lowest_nan = *reinterpret_cast<const RowNumber*>(early_.read());
    } else {
      HostLink::of(device_).download(&lowest_nan, this->lowest_nan(), sizeof(RowNumber), measured_);
    }
    if (lowest_nan != kNoRow) weight_.refuse_nan(static_cast<int64_t>(lowest_nan));
    return row_ids;
  }

 private:
  int device_;
  cudaStream_t stream_;
  MeasuredWeight weight_;
  StreamMemory scores_;
  StreamMemory lowest_nan_;
  Event measured_;
  EarlyDownload early_;  // of the lowest row that holds NaN
  std::unique_ptr<DevicePendingRows> rows_;
};

DeviceMemory allocate_baseline(const std::string& table, const WeightView& weight, int64_t bytes) {
  try {
    return DeviceMemory(bytes);
  } catch (const CudaError& error) {
    throw CudaError(error, "table '" + table + "': LargestChange keeps a copy of its weight, " +
                               std::to_string(weight.num_rows) + " rows of " +
                               std::to_string(bytes / weight.num_rows) + " bytes, " +
                               std::to_string(bytes) +
                               " in all, on the device; free so much, or use MostFrequentlyUsed");
  }
}

}  // namespace

struct DeviceChangeMeter::OnDevice {
  OnDevice(const std::string& table, const WeightView& weight, int64_t row_bytes,
           cudaStream_t stream)
      : dirty(weight.num_rows, stream),
        carried(weight.num_rows * static_cast<int64_t>(sizeof(float))),
        baseline(allocate_baseline(table, weight, weight.num_rows * row_bytes)) {
    CPR_EXT_CUDA(cudaMemsetAsync(carried.data(), 0,
                                 static_cast<size_t>(weight.num_rows) * sizeof(float), stream));
  }

  Measured with(const WeightView& weight) const {
    return {weight.data,          weight.row_stride_bytes, baseline.data(),
            weight.embedding_dim, dirty.words(),           carried.as<float>()};
  }

  DeviceBitmap dirty;
  DeviceMemory carried;
  DeviceMemory baseline;
};

DeviceChangeMeter::DeviceChangeMeter(std::string name, const WeightView& weight, int device)
    : DeviceTracker(name, weight.num_rows, device), weight_(name, weight) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = stream_of(device);
  on_device_ = std::make_unique<OnDevice>(name, weight, weight_.row_bytes(), stream);
  load_kernel(lookups_kernel<DirtyTarget>);
  visit_format(weight_.dtype(), [&](auto format) {
    CPR_EXT_LAUNCH(rebase_kernel<decltype(format)>, blocks_for(weight.num_rows, kRowsPerBlock),
                   kThreads, stream, on_device_->with(weight), RowList{nullptr, 0, num_rows()});
  });
}

DeviceChangeMeter::~DeviceChangeMeter() = default;

int64_t DeviceChangeMeter::memory_bytes() const {
  const int64_t bytes_per_row = weight_.row_bytes() + static_cast<int64_t>(sizeof(float));
  return num_rows() * bytes_per_row + on_device_->dirty.num_bytes();
}

DirtyMarks DeviceChangeMeter::dirty_marks() const { return {on_device_->dirty.words(), false}; }

std::unique_ptr<PendingRows> DeviceChangeMeter::begin_select_best(RowRange range, int64_t k,
                                                                  const WeightView* weight) const {
  const Measured measured = on_device_->with(weight_.checked(weight));
  const DeviceGuard guard(device());
  auto pending = std::make_unique<MeasuredRows>(device(), range.size(), weight_);
  visit_format(weight_.dtype(), [&](auto format) {
    CPR_EXT_LAUNCH(measure_kernel<decltype(format)>, blocks_for(range.size(), kRowsPerBlock),
                   kThreads, stream_of(device()), measured,
                   RowList{nullptr, range.begin, range.size()}, pending->scores(),
                   pending->lowest_nan());
  });
  pending->choose(range, k);
  return pending;
}

const TakenCodec& DeviceChangeMeter::codec() const {
  static const TakenCodec codec{
      [](TakenRows* taken, uint32_t value) { taken->changes.push_back(float_of(value)); },
      [](const TakenRows& taken, size_t i) { return bits_of(taken.changes[i]); }};
  return codec;
}

void DeviceChangeMeter::launch_take(const RowList& rows, const WeightView* weight,
                                    uint32_t* values) {
  const Measured measured = on_device_->with(weight_.checked(weight));
  visit_format(weight_.dtype(), [&](auto format) {
    CPR_EXT_LAUNCH(take_measured_kernel<decltype(format)>, blocks_for(rows.size, kRowsPerBlock),
                   kThreads, stream_of(device()), measured, rows, values);
  });
}

void DeviceChangeMeter::launch_put_back(const RowList& rows, const uint32_t* values) {
  CPR_EXT_LAUNCH(put_back_measured_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 on_device_->dirty.words(), on_device_->carried.as<float>(), rows, values);
}

}  // namespace cpr_ext
