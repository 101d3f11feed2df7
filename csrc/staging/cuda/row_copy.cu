#include <algorithm>
#include <cstring>
#include <string>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/error.h"
#include "staging/cuda/row_copy.h"

namespace cpr_ext {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;        // independent loads that overlap
constexpr int64_t kAlign = 256;          // of each array in a buffer
constexpr int64_t kSlack = 64 * kAlign;  // beside buffer_bytes, so that padding takes none of them
constexpr int64_t kSmallestBuffer = 64 * 1024;  // where memory is short
// A launch's parameters are limited to 4 KB.
constexpr int kArraysPerLaunch = 32;

// An array's rows in its table and packed in a buffer.
struct ArrayCopy {
  std::byte* table;  // row `first_row_id`
  std::byte* packed;
  int64_t row_bytes;
  int64_t row_stride_bytes;
  int64_t first_row_id;
  int32_t unit_bytes;       // 16, 8, 4, 2 or 1: all addresses are multiples of it
  int32_t threads_per_row;  // a power of two, at most a warp
};

struct RowCopies {
  ArrayCopy arrays[kArraysPerLaunch];
  const int64_t* row_ids;  // on the device; null: the rows from range_begin on
  int64_t range_begin;
  int64_t count;
};
static_assert(sizeof(RowCopies) <= 4096, "the parameters of a launch");

// Few threads share a row, so that a warp has many rows on their way; each copies units of the
// widest kind that the addresses allow, of several rows at once. Packed bytes are read or written
// one after the other, rows as they lie.
template <bool kGathers, class Unit>
__device__ void copy_rows(const RowCopies& copies, const ArrayCopy& array) {
  const int64_t units = array.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int per_row = array.threads_per_row;
  const int rows_per_block = kThreads / per_row;
  const int64_t first_unit = threadIdx.x % per_row;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * rows_per_block * kRowsPerThread + threadIdx.x / per_row;
  Unit* in_table[kRowsPerThread];
  Unit* in_buffer[kRowsPerThread];
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t position = row + static_cast<int64_t>(i) * rows_per_block;
    in_table[i] = nullptr;
    if (position >= copies.count) continue;
    const int64_t row_id =
        copies.row_ids == nullptr ? copies.range_begin + position : copies.row_ids[position];
    in_table[i] = reinterpret_cast<Unit*>(array.table +
                                          (row_id - array.first_row_id) * array.row_stride_bytes);
    in_buffer[i] = reinterpret_cast<Unit*>(array.packed + position * array.row_bytes);
  }
  for (int64_t unit = first_unit; unit < units; unit += per_row) {
    Unit values[kRowsPerThread];
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (in_table[i] != nullptr) values[i] = (kGathers ? in_table[i] : in_buffer[i])[unit];
    }
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (in_table[i] != nullptr) (kGathers ? in_buffer[i] : in_table[i])[unit] = values[i];
    }
  }
}

// grid: blocks of rows, for all of them, by arrays. All arrays of a table in one launch.
template <bool kGathers>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ RowCopies copies) {
  const ArrayCopy& array = copies.arrays[blockIdx.y];
  switch (array.unit_bytes) {
    case 16:
      return copy_rows<kGathers, uint4>(copies, array);
    case 8:
      return copy_rows<kGathers, uint2>(copies, array);
    case 4:
      return copy_rows<kGathers, uint32_t>(copies, array);
    case 2:
      return copy_rows<kGathers, uint16_t>(copies, array);
    default:
      return copy_rows<kGathers, uint8_t>(copies, array);
  }
}

int64_t round_up(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int32_t unit_of(const ArrayCopy& array) {
  const auto address = reinterpret_cast<uintptr_t>(array.table);
  const auto bits = address | static_cast<uintptr_t>(array.row_bytes | array.row_stride_bytes);
  for (int32_t bytes = 16; bytes > 1; bytes /= 2) {
    if (bits % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 1;
}

int32_t threads_for(int64_t units) {
  int32_t threads = 1;
  while (threads < 32 && threads < units) threads *= 2;
  return threads;
}

class CudaStager final : public DeviceStager {
 public:
  CudaStager(int device, int64_t buffer_bytes, int num_buffers)
      : device_(device), buffer_bytes_(buffer_bytes), buffers_(static_cast<size_t>(num_buffers)) {
    for (Buffer& buffer : buffers_) buffer.memory = DeviceMemory(buffer_bytes + kSlack);
  }
  ~CudaStager() override {
    try {
      finish();
    } catch (const CudaError&) {  // whoever waited for an arrival was told
    }
  }

  int device() const override { return device_; }
  int64_t buffer_bytes() const override { return buffer_bytes_; }

  void pin(std::byte* slot, int64_t bytes) override {
    const DeviceGuard guard(device_);
    CPR_EXT_CUDA(cudaHostRegister(slot, static_cast<size_t>(bytes), cudaHostRegisterPortable));
  }

  void unpin(std::byte* slot) noexcept override {
    const DeviceGuard guard(device_, std::nothrow);
    if (cudaHostUnregister(slot) != cudaSuccess) (void)cudaGetLastError();
  }

  std::unique_ptr<Arrival> gather(const std::vector<StagedArray>& arrays, const StagedRows& rows,
                                  std::byte* slot) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const DeviceGuard guard(device_);
    auto arrival = std::make_unique<CopiedOut>(device_, copies_out_.get());
    in_rounds(arrays, rows, [&](const Round& round) {
      const Staged staged = stage(arrays, rows, round);
      if (rows.row_ids != nullptr) {
        CPR_EXT_CUDA(cudaMemcpyAsync(round.memory, rows.row_ids + round.first,
                                     id_bytes(round.count), cudaMemcpyHostToDevice, stream()));
      }
      copy<true>(staged, round.count);
      round.buffer->is_filled.record(stream());
      round.buffer->is_filled.block(copies_out_.get());
      for (size_t i = 0; i < arrays.size(); ++i) {
        const int64_t row_bytes = arrays[i].rows.row_bytes;
        CPR_EXT_CUDA(cudaMemcpyAsync(slot + arrays[i].offset + round.first * row_bytes,
                                     staged.packed[i], static_cast<size_t>(round.count * row_bytes),
                                     cudaMemcpyDeviceToHost, copies_out_.get()));
      }
      round.buffer->is_free.record(copies_out_.get());
    });
    arrival->record();
    return arrival;
  }

  void scatter(const std::vector<StagedArray>& arrays, const StagedRows& rows,
               const std::byte* slot) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const DeviceGuard guard(device_);
    HostLink& link = HostLink::of(device_);
    open_ = nullptr;  // its copies go another way
    in_rounds(arrays, rows, [&](const Round& round) {
      const Staged staged = stage(arrays, rows, round);
      if (rows.row_ids != nullptr) {
        link.upload(round.memory, rows.row_ids + round.first,
                    static_cast<int64_t>(id_bytes(round.count)), stream());
      }
      for (size_t i = 0; i < arrays.size(); ++i) {
        const int64_t row_bytes = arrays[i].rows.row_bytes;
        link.upload(staged.packed[i], slot + arrays[i].offset + round.first * row_bytes,
                    round.count * row_bytes, stream());
      }
      copy<false>(staged, round.count);
      round.buffer->is_free.record(stream());
    });
    open_ = nullptr;
  }

  void finish() override {
    const DeviceGuard guard(device_);
    CPR_EXT_CUDA(cudaStreamSynchronize(stream()));
    CPR_EXT_CUDA(cudaStreamSynchronize(copies_out_.get()));
  }

 private:
  struct Buffer {
    DeviceMemory memory;
    Event is_filled;
    Event is_free;
  };

  // Everything that was submitted to the stream of copies before record(), or if that was never
  // reached before it is destroyed.
  class CopiedOut final : public Arrival {
   public:
    CopiedOut(int device, cudaStream_t stream) : device_(device), stream_(stream) {}
    ~CopiedOut() override {
      try {
        const DeviceGuard guard(device_);
        if (!is_recorded_) record();
        wait();
      } catch (const CudaError&) {  // nothing will arrive any more
      }
    }
    void record() {
      event_.record(stream_);
      is_recorded_ = true;
    }
    void wait() override {
      const DeviceGuard guard(device_);
      const WaitsBesideCaptures waits;
      event_.wait();
    }

   private:
    int device_;
    cudaStream_t stream_;
    Event event_;
    bool is_recorded_ = false;
  };

  // Rows [first, first + count) of those to be copied, as many as a buffer holds.
  struct Round {
    Buffer* buffer;
    std::byte* memory;  // of the buffer
    int64_t first;
    int64_t count;
  };

  // A round's part of every array in its buffer.
  struct Staged {
    std::vector<std::byte*> packed;
    std::vector<RowCopies> launches;
  };

  cudaStream_t stream() const { return stream_of(device_); }
  static size_t id_bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(int64_t); }

  template <class Body>
  void in_rounds(const std::vector<StagedArray>& arrays, const StagedRows& rows, const Body& body) {
    int64_t row_bytes = rows.row_ids == nullptr ? 0 : static_cast<int64_t>(sizeof(int64_t));
    for (const StagedArray& array : arrays) row_bytes += array.rows.row_bytes;
    const int64_t padding = kAlign * (static_cast<int64_t>(arrays.size()) + 1);
    const int64_t most_rows = (buffer_bytes_ + kSlack - padding) / row_bytes;
    if (most_rows < 1) {
      throw UsageError("a row of " + std::to_string(row_bytes) + " bytes does not fit the " +
                       std::to_string(buffer_bytes_) + " bytes of a buffer on device " +
                       std::to_string(device_) + "; make slot_bytes larger");
    }
    for (int64_t first = 0; first < rows.count; first += most_rows) {
      const int64_t count = std::min(most_rows, rows.count - first);
      std::byte* const memory = allocate(count * row_bytes + padding);
      body(Round{open_, memory, first, count});
    }
  }

  // Memory of the open buffer, or if it has not as much left, or another stream opened it, of the
  // next, which then is: for that one alone the stream waits, until it is free. So small copies do
  // not take a buffer each. REQUIRES: it fits a buffer.
  std::byte* allocate(int64_t bytes) {
    if (open_ == nullptr || opener_ != stream() || used_ + bytes > buffer_bytes_ + kSlack) {
      open_ = &buffers_[next_];
      opener_ = stream();
      used_ = 0;
      next_ = (next_ + 1) % buffers_.size();
      open_->is_free.block(stream());
    }
    std::byte* const memory = open_->memory.data() + used_;
    used_ = round_up(used_ + bytes);
    return memory;
  }

  Staged stage(const std::vector<StagedArray>& arrays, const StagedRows& rows,
               const Round& round) const {
    Staged staged;
    std::byte* to = round.memory;
    const bool has_ids = rows.row_ids != nullptr;
    RowCopies copies{};
    copies.row_ids = has_ids ? reinterpret_cast<const int64_t*>(to) : nullptr;
    copies.range_begin = rows.first_row_id + round.first;
    copies.count = round.count;
    if (has_ids) to += round_up(static_cast<int64_t>(id_bytes(round.count)));
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (i % kArraysPerLaunch == 0) staged.launches.push_back(copies);
      const RowArray& table = arrays[i].rows;
      ArrayCopy copy{table.data, to, table.row_bytes, table.row_stride_bytes, table.first_row_id,
                     0,          0};
      copy.unit_bytes = unit_of(copy);
      copy.threads_per_row = threads_for(copy.row_bytes / copy.unit_bytes);
      staged.launches.back().arrays[i % kArraysPerLaunch] = copy;
      staged.packed.push_back(to);
      to += round_up(round.count * table.row_bytes);
    }
    return staged;
  }

  template <bool kGathers>
  void copy(const Staged& staged, int64_t count) const {
    const auto num_arrays = static_cast<int64_t>(staged.packed.size());
    for (size_t i = 0; i < staged.launches.size(); ++i) {
      const int64_t in_launch = std::min<int64_t>(
          kArraysPerLaunch, num_arrays - static_cast<int64_t>(i) * kArraysPerLaunch);
      int64_t num_blocks = 1;
      for (int64_t j = 0; j < in_launch; ++j) {
        const int64_t per_block =
            kThreads / staged.launches[i].arrays[j].threads_per_row * kRowsPerThread;
        num_blocks = std::max(num_blocks, (count + per_block - 1) / per_block);
      }
      CPR_EXT_LAUNCH(copy_rows_kernel<kGathers>, Grid(num_blocks, in_launch), kThreads, stream(),
                     staged.launches[i]);
    }
  }

  const int device_;
  const int64_t buffer_bytes_;
  std::mutex mutex_;  // guards all below
  std::vector<Buffer> buffers_;
  size_t next_ = 0;
  Buffer* open_ = nullptr;  // the one filled last, for gathers alone; null: none
  cudaStream_t opener_ = nullptr;
  int64_t used_ = 0;  // bytes of it
  SideStream copies_out_;
};

}  // namespace

std::shared_ptr<DeviceStager> make_device_stager(int device, int64_t slot_bytes, int num_slots) {
  if (device < 0 || device >= num_devices()) {
    throw UsageError("device is " + std::to_string(device) + "; there are " +
                     std::to_string(num_devices()) + " CUDA devices");
  }
  if (num_slots < 1 || slot_bytes < 1) {
    throw UsageError("num_slots is " + std::to_string(num_slots) + ", slot_bytes " +
                     std::to_string(slot_bytes) + "; both must be positive");
  }
  const DeviceGuard guard(device);
  for (;;) {
    try {
      return std::make_shared<CudaStager>(device, slot_bytes, num_slots);
    } catch (const CudaError& error) {
      if (error.code() != cudaErrorMemoryAllocation || slot_bytes / 2 < kSmallestBuffer) throw;
      slot_bytes /= 2;
    }
  }
}

}  // namespace cpr_ext
