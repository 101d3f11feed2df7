#include <algorithm>
#include <utility>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/error.h"
#include "scrub/cuda/row_hashes.h"
#include "scrub/row_hash.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/row_change.h"
#include "tracking/cuda/row_list.h"
#include "tracking/cuda/tracker.h"

namespace cpr_ext {

namespace {

constexpr int kMostArrays = 32;  // a launch's parameters are limited to 4 KB

struct HashedArray {
  const std::byte* data;
  int64_t row_bytes;
  int64_t row_stride_bytes;
  uint64_t first_key;  // of its first word
  int32_t unit_bytes;  // 8, 4, 2 or 1: all addresses and sizes are multiples of it
};

// The word at `at`, of whose row so many bytes are left.
template <class Unit>
__device__ uint64_t load_word(const std::byte* at, int64_t bytes_left) {
  constexpr auto kUnit = static_cast<int64_t>(sizeof(Unit));
  const auto* units = reinterpret_cast<const Unit*>(at);
  uint64_t word = 0;
#pragma unroll
  for (int64_t i = 0; i < kHashWordBytes / kUnit; ++i) {
    if (i * kUnit < bytes_left) word |= static_cast<uint64_t>(units[i]) << (8 * i * kUnit);
  }
  return word;
}

struct HashedTable {
  HashedArray arrays[kMostArrays];
  int32_t num_arrays;

  // The hash of a row, in its first lane; `row` below zero: none. All lanes of a warp call it.
  __device__ uint16_t hash(int64_t row) const {
    uint64_t sum = 0, bits = 0;
    for (int i = 0; row >= 0 && i < num_arrays; ++i) {
      switch (arrays[i].unit_bytes) {
        case 8:
          add<uint64_t>(arrays[i], row, &sum, &bits);
          break;
        case 4:
          add<uint32_t>(arrays[i], row, &sum, &bits);
          break;
        case 2:
          add<uint16_t>(arrays[i], row, &sum, &bits);
          break;
        default:
          add<uint8_t>(arrays[i], row, &sum, &bits);
      }
    }
    for (int delta = kLanesPerRow / 2; delta > 0; delta /= 2) {
      sum += __shfl_down_sync(kAllLanes, sum, delta);
      bits ^= __shfl_down_sync(kAllLanes, bits, delta);
    }
    const auto folded = static_cast<unsigned>(bits ^ bits >> 32);
    return hash_value(sum, __popc(folded) % 2 != 0);
  }

  template <class Unit>
  __device__ static void add(const HashedArray& array, int64_t row, uint64_t* sum, uint64_t* bits) {
    const std::byte* const data = array.data + row * array.row_stride_bytes;
    const int64_t num_words = (array.row_bytes + kHashWordBytes - 1) / kHashWordBytes;
    for (int64_t i = lane_of_row(); i < num_words; i += kLanesPerRow) {
      const int64_t at = i * kHashWordBytes;
      const uint64_t word = load_word<Unit>(data + at, array.row_bytes - at);
      *sum += hash_product(word, array.first_key + static_cast<uint64_t>(i) * kHashStep);
      *bits ^= word;
    }
  }
};
static_assert(sizeof(HashedTable) + sizeof(RowList) <= 2048, "the parameters of a launch");

__global__ void __launch_bounds__(kThreads)
    record_kernel(const __grid_constant__ HashedTable table, RowList rows, uint16_t* hashes) {
  const int64_t i = row_of_grid();
  const int64_t row = i < rows.size ? rows.row(i) : -1;
  const uint16_t hash = table.hash(row);
  if (row >= 0 && lane_of_row() == 0) hashes[row] = hash;
}

// A RowComparison as kernels write it.
struct Found {
  unsigned long long changed_row;  // all bits set: none
  unsigned long long num_compared;
  unsigned long long num_unknown;
};
constexpr unsigned long long kNone = ~0ull;

// Threads take several rows, so that few add to the sums.
__global__ void __launch_bounds__(kThreads)
    compare_kernel(const __grid_constant__ HashedTable table, int64_t first, int64_t num_rows,
                   DirtyMarks dirty, const uint16_t* hashes, Found* found) {
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  unsigned num_compared = 0, num_unknown = 0;
  const int64_t warp_begin = row_of_grid() - threadIdx.x % 32 / kLanesPerRow;
  for (int64_t begin = warp_begin; begin < num_rows; begin += num_threads) {
    const int64_t i = begin + threadIdx.x % 32 / kLanesPerRow;
    int64_t row = i < num_rows ? first + i : -1;
    if (row >= 0 && dirty.is_dirty(row)) row = -1;
    const uint16_t now = table.hash(row);
    if (row < 0 || lane_of_row() != 0) continue;
    const uint16_t saved = hashes[row];
    if (saved == 0) {
      ++num_unknown;
      continue;
    }
    ++num_compared;
    if (saved != now) atomicMin(&found->changed_row, static_cast<unsigned long long>(row));
  }
  __syncwarp();
  add_over_warps(num_compared, &found->num_compared);
  add_over_warps(num_unknown, &found->num_unknown);
}

class DeviceComparison final : public PendingComparison {
 public:
  // REQUIRES: the device is current.
  explicit DeviceComparison(int device)
      : device_(device), found_(sizeof(Found), stream_of(device)) {
    const cudaStream_t stream = stream_of(device);
    CPR_EXT_CUDA(cudaMemsetAsync(found(), 0, sizeof(Found), stream));
    CPR_EXT_CUDA(cudaMemsetAsync(&found()->changed_row, 0xff, sizeof(kNone), stream));
  }

  Found* found() const { return found_.as<Found>(); }

  // Once the comparison is launched.
  void begin_download() {
    done_.record(stream_of(device_));
    early_.begin(device_, found(), sizeof(Found), done_);
  }

  bool is_ready() override {
    const DeviceGuard guard(device_);
    return early_.is_begun() ? early_.has_arrived() : done_.is_done();
  }

  RowComparison read() override {
    const DeviceGuard guard(device_);
    Found here;
    if (early_.is_begun()) {
      std::copy_n(early_.read(), sizeof(here), reinterpret_cast<std::byte*>(&here));
    } else {
      HostLink::of(device_).download(&here, found(), sizeof(here), done_);
    }
    const int64_t changed = here.changed_row == kNone ? -1 : static_cast<int64_t>(here.changed_row);
    return {changed, static_cast<int64_t>(here.num_compared),
            static_cast<int64_t>(here.num_unknown)};
  }

 private:
  int device_;
  StreamMemory found_;
  Event done_;
  EarlyDownload early_;
};

int32_t unit_of(const RowArray& array) {
  const auto bits = reinterpret_cast<uintptr_t>(array.data) |
                    static_cast<uintptr_t>(array.row_bytes | array.row_stride_bytes);
  int32_t bytes = kHashWordBytes;
  while (bits % static_cast<uintptr_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

HashedTable table_of(const std::vector<RowArray>& arrays) {
  HashedTable table = {};
  uint64_t key = kHashStep;
  for (const RowArray& array : arrays) {
    table.arrays[table.num_arrays++] = {array.data, array.row_bytes, array.row_stride_bytes, key,
                                        unit_of(array)};
    const int64_t num_words = (array.row_bytes + kHashWordBytes - 1) / kHashWordBytes;
    key += static_cast<uint64_t>(num_words) * kHashStep;
  }
  return table;
}

}  // namespace

struct DeviceRowHashes::OnDevice {
  explicit OnDevice(int64_t bytes) : memory(bytes) {}

  uint16_t* hashes() const { return memory.as<uint16_t>(); }

  // REQUIRES: the device is current. Rows of more arrays than a launch takes have no hash.
  void record(const Arrays& arrays, const RowList& rows, cudaStream_t stream) const {
    if (arrays.size() > kMostArrays) return;
    CPR_EXT_LAUNCH(record_kernel, blocks_for(rows.size, kRowsPerBlock), kThreads, stream,
                   table_of(arrays), rows, hashes());
  }

  std::unique_ptr<PendingComparison> compare(const Arrays& arrays, RowRange rows,
                                             const RowTracker& tracker, int device) const {
    if (arrays.size() > kMostArrays) {
      throw UsageError("table '" + tracker.name() + "': a row has " +
                       std::to_string(arrays.size()) + " arrays; the most that are compared is " +
                       std::to_string(kMostArrays));
    }
    if (tracker.device() != device) {
      throw UsageError("table '" + tracker.name() + "': its tracker is on another device");
    }
    tracker.settle();
    auto pending = std::make_unique<DeviceComparison>(device);
    const int64_t num_blocks = std::min(kMostBlocks, blocks_for(rows.size(), kRowsPerBlock));
    CPR_EXT_LAUNCH(compare_kernel, num_blocks, kThreads, stream_of(device), table_of(arrays),
                   rows.begin, rows.size(),
                   static_cast<const DeviceTracker&>(tracker).dirty_marks(), hashes(),
                   pending->found());
    pending->begin_download();
    return pending;
  }

  DeviceMemory memory;
};

DeviceRowHashes::DeviceRowHashes(std::string name, int64_t num_rows, int device)
    : RowHashes(std::move(name), num_rows), device_(checked_device(device)) {
  const DeviceGuard guard(device_);
  on_device_ = std::make_unique<OnDevice>(memory_bytes());
  forget();
}

DeviceRowHashes::~DeviceRowHashes() = default;

void DeviceRowHashes::forget() {
  const DeviceGuard guard(device_);
  CPR_EXT_CUDA(cudaMemsetAsync(on_device_->hashes(), 0, static_cast<size_t>(memory_bytes()),
                               stream_of(device_)));
}

void DeviceRowHashes::hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool*) {
  if (row_ids.size == 0) return;
  const DeviceGuard guard(device_);
  const Uploaded<int64_t> ids(row_ids.data, row_ids.size, device_, stream_of(device_));
  on_device_->record(arrays, {ids.get(), 0, row_ids.size}, stream_of(device_));
}

void DeviceRowHashes::hash_range(const Arrays& arrays, RowRange range, ThreadPool*) {
  const DeviceGuard guard(device_);
  on_device_->record(arrays, {nullptr, range.begin, range.size()}, stream_of(device_));
}

void DeviceRowHashes::record_chosen(const Arrays& arrays, const PendingRows& chosen) {
  check_arrays(arrays);
  if (chosen.chooser == nullptr || chosen.chooser->device() != device_ ||
      chosen.chooser->num_rows() != num_rows()) {
    throw UsageError("table '" + name() + "': the rows were not chosen of it on its device");
  }
  const DeviceGuard guard(device_);
  const RowList rows{chosen.ids_on_device(), 0, chosen.num_rows()};
  on_device_->record(arrays, rows, stream_of(device_));
}

std::unique_ptr<PendingComparison> DeviceRowHashes::begin_compare(const Arrays& arrays,
                                                                  const RowTracker& tracker,
                                                                  RowRange range) {
  check_arrays(arrays);
  check_range(range);
  const DeviceGuard guard(device_);
  return on_device_->compare(arrays, range, tracker, device_);
}

std::vector<uint16_t> DeviceRowHashes::copy_range(RowRange range) const {
  std::vector<uint16_t> found(static_cast<size_t>(range.size()));
  if (found.empty()) return found;
  const DeviceGuard guard(device_);
  const int64_t bytes = range.size() * static_cast<int64_t>(sizeof(uint16_t));
  HostLink::of(device_).download(found.data(), on_device_->hashes() + range.begin, bytes,
                                 stream_of(device_));
  return found;
}

}  // namespace cpr_ext
