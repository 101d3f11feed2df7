#include "core/cuda/device.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/dirty_rows.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/lookups.h"
#include "tracking/cuda/pending_rows.h"
#include "tracking/cuda/row_list.h"

namespace cpr_ext {

namespace {

__global__ void __launch_bounds__(kThreads)
    take_dirty_kernel(uint32_t* dirty, RowList rows, uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  const int64_t row = rows.row(i);
  const bool is_dirty = is_bit_set(dirty, row);
  taken[i] = is_dirty ? 1 : 0;
  if (is_dirty) clear_bit(dirty, row);
}

__global__ void __launch_bounds__(kThreads) put_back_dirty_kernel(uint32_t* dirty, RowList rows) {
  const int64_t i = thread_of_grid();
  if (i < rows.size) set_bit(dirty, rows.row(i));
}

}  // namespace

DeviceDirtyRows::DeviceDirtyRows(std::string name, int64_t num_rows, int device)
    : DeviceTracker(std::move(name), num_rows, device) {
  const DeviceGuard guard(device);
  dirty_ = std::make_unique<DeviceBitmap>(num_rows, stream_of(device));
  load_kernel(lookups_kernel<DirtyTarget>);
}

DeviceDirtyRows::~DeviceDirtyRows() = default;

int64_t DeviceDirtyRows::memory_bytes() const { return dirty_->num_bytes(); }

DirtyMarks DeviceDirtyRows::dirty_marks() const { return {dirty_->words(), false}; }

std::unique_ptr<PendingRows> DeviceDirtyRows::begin_select_best(RowRange range, int64_t k,
                                                                const WeightView*) const {
  const DeviceGuard guard(device());
  const int64_t first = range.size() == 0 ? range.begin : rotation_.begin_selection(range);
  const SetBits dirty{dirty_->words(), range.begin};
  const BitsInTurn in_turn{dirty, first - range.begin};
  return std::make_unique<DevicePendingRows>(device(), in_turn, range, k);
}

TakenRows DeviceDirtyRows::clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) {
  std::vector<RotationMark> marks = rotation_.marks(row_ids);
  TakenRows taken = DeviceTracker::clear_rows(row_ids, weight, pool);
  taken.marks = std::move(marks);
  rotation_.pass(row_ids);
  return taken;
}

TakenRows DeviceDirtyRows::clear_chosen(const ChosenRows& chosen, RowIds row_ids,
                                        const WeightView* weight) {
  std::vector<RotationMark> marks = rotation_.marks(row_ids);
  TakenRows taken = DeviceTracker::clear_chosen(chosen, row_ids, weight);
  taken.marks = std::move(marks);
  rotation_.pass(row_ids);
  return taken;
}

void DeviceDirtyRows::restore(const TakenRows& taken) {
  DeviceTracker::restore(taken);
  rotation_.return_to(taken.marks);
}

const TakenCodec& DeviceDirtyRows::codec() const {
  static const TakenCodec codec{[](TakenRows*, uint32_t) {},
                                [](const TakenRows&, size_t) { return uint32_t{1}; }};
  return codec;
}

void DeviceDirtyRows::launch_take(const RowList& rows, const WeightView*, uint32_t* values) {
  CPR_EXT_LAUNCH(take_dirty_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 dirty_->words(), rows, values);
}

void DeviceDirtyRows::launch_put_back(const RowList& rows, const uint32_t*) {
  CPR_EXT_LAUNCH(put_back_dirty_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 dirty_->words(), rows);
}

}  // namespace cpr_ext
