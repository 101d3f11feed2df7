#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

#include "core/cuda/device.h"
#include "core/error.h"
#include "staging/cuda/row_copy.h"
#include "staging/cuda/row_rounding.h"

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
  int32_t unit_bytes;           // 16, 8, 4, 2 or 1: all addresses are multiples of it
  int32_t log_threads_per_row;  // at most a warp's
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
// one after the other, rows as they lie. Row ids are read without a branch, so that all are on
// their way at once.
template <bool kGathers, class Unit>
__device__ void copy_rows(const RowCopies& copies, const ArrayCopy& array) {
  const int units = static_cast<int>(array.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int per_row = 1 << array.log_threads_per_row;
  const int rows_per_block = kThreads >> array.log_threads_per_row;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (rows_per_block * kRowsPerThread) +
                      (thread >> array.log_threads_per_row);
  const int64_t left = copies.count - row;
  if (left <= 0) return;
  int64_t row_ids[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t wanted = row + i * rows_per_block;
    const int64_t position = wanted < copies.count ? wanted : row;
    row_ids[i] =
        copies.row_ids == nullptr ? copies.range_begin + position : copies.row_ids[position];
  }
  Unit* in_table[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    in_table[i] = reinterpret_cast<Unit*>(array.table + (row_ids[i] - array.first_row_id) *
                                                            array.row_stride_bytes);
  }
  Unit* const in_buffer = reinterpret_cast<Unit*>(array.packed + row * array.row_bytes);
  const int64_t next = static_cast<int64_t>(rows_per_block) * units;
#pragma unroll 1
  for (int unit = thread & (per_row - 1); unit < units; unit += per_row) {
    Unit values[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (i * rows_per_block < left) {
        values[i] = (kGathers ? in_table[i] : in_buffer + i * next)[unit];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (i * rows_per_block < left) {
        (kGathers ? in_buffer + i * next : in_table[i])[unit] = values[i];
      }
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
  const auto addresses =
      reinterpret_cast<uintptr_t>(array.table) | reinterpret_cast<uintptr_t>(array.packed);
  const auto bits = addresses | static_cast<uintptr_t>(array.row_bytes | array.row_stride_bytes);
  for (int32_t bytes = 16; bytes > 1; bytes /= 2) {
    if (bits % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 1;
}

int32_t log_threads_for(int64_t units) {
  int32_t log = 0;
  while (log < 5 && (1 << log) < units) ++log;
  return log;
}

ArrayCopy copy_of(const RowArray& table, std::byte* packed) {
  ArrayCopy copy{table.data, packed, table.row_bytes, table.row_stride_bytes, table.first_row_id,
                 0,          0};
  copy.unit_bytes = unit_of(copy);
  copy.log_threads_per_row = log_threads_for(copy.row_bytes / copy.unit_bytes);
  return copy;
}

// Arrays of one table, for as few launches as may be.
class Launches {
 public:
  // rows: without arrays.
  explicit Launches(const RowCopies& rows) : rows_(rows) {}

  void add(const ArrayCopy& array) {
    const int i = num_arrays_++ % kArraysPerLaunch;
    if (i == 0) launches_.push_back(rows_);
    launches_.back().arrays[i] = array;
  }

  template <bool kGathers>
  void submit(cudaStream_t stream) const {
    int left = num_arrays_;
    for (const RowCopies& launch : launches_) {
      const int in_launch = std::min(kArraysPerLaunch, left);
      left -= in_launch;
      int64_t num_blocks = 1;
      for (int i = 0; i < in_launch; ++i) {
        const int64_t per_block =
            (kThreads >> launch.arrays[i].log_threads_per_row) * kRowsPerThread;
        num_blocks = std::max(num_blocks, (rows_.count + per_block - 1) / per_block);
      }
      CPR_EXT_LAUNCH(copy_rows_kernel<kGathers>, Grid(num_blocks, in_launch), kThreads, stream,
                     launch);
    }
  }

 private:
  const RowCopies rows_;
  std::vector<RowCopies> launches_;
  int num_arrays_ = 0;
};

class CudaStager final : public DeviceStager {
 public:
  CudaStager(int device, int64_t buffer_bytes, int num_buffers)
      : device_(device), buffer_bytes_(buffer_bytes), buffers_(static_cast<size_t>(num_buffers)) {
    for (Buffer& buffer : buffers_) buffer.memory = DeviceMemory(buffer_bytes + kSlack);
    // Settled rows are gathered whatever training does meanwhile: it may capture a graph.
    load_kernel(copy_rows_kernel<true>);
    load_rounding();
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
    // For copies from any device.
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
    const cudaStream_t kernels = rows.are_settled ? copies_out_.get() : stream();
    auto arrival = std::make_unique<Submitted>(device_, copies_out_.get(), kernels);
    in_rounds(arrays, rows, kernels, [&](const Round& round) {
      const Staged staged = stage(arrays, rows, round);
      if (rows.row_ids != nullptr) upload_ids(rows, round, kernels);
      staged.launches.submit<true>(kernels);
      for (const RoundedRows& rounded : staged.rounded) launch_rounding(rounded, kernels);
      if (!rows.are_settled) {
        round.buffer->is_filled.record(kernels);
        round.buffer->is_filled.block(copies_out_.get());
      }
      for (size_t i = 0; i < arrays.size(); ++i) {
        copy_out(staged.packed[i], slot + arrays[i].offset, arrays[i].packed_row_bytes(), round);
      }
      round.buffer->is_free.record(copies_out_.get());
    });
    arrival->record();
    return arrival;
  }

  void settle() override {
    std::lock_guard<std::mutex> lock(mutex_);
    const DeviceGuard guard(device_);
    settled_.record(stream());
    settled_.block(copies_out_.get());
  }

  std::unique_ptr<Arrival> scatter(const std::vector<StagedArray>& arrays, const StagedRows& rows,
                                   const std::byte* slot) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const DeviceGuard guard(device_);
    auto arrival = std::make_unique<Submitted>(device_, stream(), stream());
    open_ = nullptr;  // its copies go another way
    in_rounds(arrays, rows, stream(), [&](const Round& round) {
      const Staged staged = stage(arrays, rows, round);
      if (rows.row_ids != nullptr) upload_ids(rows, round, stream());
      for (size_t i = 0; i < arrays.size(); ++i) {
        const int64_t row_bytes = arrays[i].packed_row_bytes();
        CPR_EXT_CUDA(cudaMemcpyAsync(
            staged.packed[i], slot + arrays[i].offset + round.first * row_bytes,
            static_cast<size_t>(round.count * row_bytes), cudaMemcpyHostToDevice, stream()));
      }
      staged.launches.submit<false>(stream());
      for (const RoundedRows& rounded : staged.rounded) launch_restoring(rounded, stream());
      round.buffer->is_free.record(stream());
    });
    open_ = nullptr;
    arrival->record();
    return arrival;
  }

  void finish() override {
    const DeviceGuard guard(device_);
    const WaitsBesideCaptures waits;
    CPR_EXT_CUDA(cudaStreamSynchronize(stream()));
    CPR_EXT_CUDA(cudaStreamSynchronize(copies_out_.get()));
  }

 private:
  struct Buffer {
    DeviceMemory memory;
    Event is_filled;
    Event is_free;
  };

  // Everything that was submitted to a stream before record(). If that was never reached: to both
  // streams before it is destroyed, as kernels write to slots, too.
  class Submitted final : public Arrival {
   public:
    Submitted(int device, cudaStream_t stream, cudaStream_t kernels)
        : device_(device), stream_(stream), kernels_(kernels) {}
    ~Submitted() override {
      try {
        const DeviceGuard guard(device_);
        if (!is_recorded_) {
          event_.record(kernels_);
          event_.block(stream_);
          record();
        }
        wait();
      } catch (const CudaError&) {  // nothing will arrive any more
      }
    }
    void record() {
      event_.record(stream_);
      is_recorded_ = true;
    }
    void wait() override {
      if (!has_arrived_) event_.wait();
      has_arrived_ = true;
    }

   private:
    int device_;
    cudaStream_t stream_;
    cudaStream_t kernels_;
    Event event_;
    bool is_recorded_ = false;
    bool has_arrived_ = false;
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
    Launches launches;
    std::vector<RoundedRows> rounded;
  };

  cudaStream_t stream() const { return stream_of(device_); }
  static size_t id_bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(int64_t); }

  void upload_ids(const StagedRows& rows, const Round& round, cudaStream_t stream) const {
    CPR_EXT_CUDA(cudaMemcpyAsync(round.memory, rows.row_ids + round.first, id_bytes(round.count),
                                 cudaMemcpyHostToDevice, stream));
  }

  template <class Body>
  void in_rounds(const std::vector<StagedArray>& arrays, const StagedRows& rows,
                 cudaStream_t stream, const Body& body) {
    int64_t row_bytes = rows.row_ids == nullptr ? 0 : static_cast<int64_t>(sizeof(int64_t));
    for (const StagedArray& array : arrays) row_bytes += array.packed_row_bytes();
    const int64_t padding = kAlign * (static_cast<int64_t>(arrays.size()) + 2);
    const int64_t most_rows = (buffer_bytes_ + kSlack - padding) / row_bytes;
    if (most_rows < 1) {
      throw UsageError("a row of " + std::to_string(row_bytes) + " bytes does not fit the " +
                       std::to_string(buffer_bytes_) + " bytes of a buffer on device " +
                       std::to_string(device_) + "; make slot_bytes larger");
    }
    for (int64_t first = 0; first < rows.count; first += most_rows) {
      const int64_t count = std::min(most_rows, rows.count - first);
      std::byte* const memory = allocate(count * row_bytes + padding, stream);
      body(Round{open_, memory, first, count});
    }
  }

  // Memory of the open buffer, or if it has not as much left, or another stream opened it, of the
  // next, which then is: for that one alone the stream waits, until it is free. So small copies do
  // not take a buffer each. REQUIRES: it fits a buffer.
  std::byte* allocate(int64_t bytes, cudaStream_t stream) {
    if (open_ == nullptr || opener_ != stream || used_ + bytes > buffer_bytes_ + kSlack) {
      open_ = &buffers_[next_];
      opener_ = stream;
      used_ = 0;
      next_ = (next_ + 1) % buffers_.size();
      open_->is_free.block(stream);
    }
    std::byte* const memory = open_->memory.data() + used_;
    used_ = round_up(used_ + bytes);
    return memory;
  }

  Staged stage(const std::vector<StagedArray>& arrays, const StagedRows& rows,
               const Round& round) const {
    std::byte* to = round.memory;
    const bool has_ids = rows.row_ids != nullptr;
    RowCopies copies{};
    copies.row_ids = has_ids ? reinterpret_cast<const int64_t*>(to) : nullptr;
    copies.range_begin = rows.first_row_id + round.first;
    copies.count = round.count;
    if (has_ids) to += round_up(static_cast<int64_t>(id_bytes(round.count)));
    Staged staged{{}, Launches(copies), {}};
    for (const StagedArray& array : arrays) {
      staged.packed.push_back(to);
      if (array.precision == RowPrecision::kExact) {
        staged.launches.add(copy_of(array.rows, to));
      } else {
        staged.rounded.push_back(
            {array.rows, array.precision, to, copies.row_ids, copies.range_begin, round.count});
      }
      to += round_up(round.count * array.packed_row_bytes());
    }
    return staged;
  }

  // A round's part of what has `row_bytes` per row.
  void copy_out(const void* from, std::byte* to, int64_t row_bytes, const Round& round) const {
    CPR_EXT_CUDA(cudaMemcpyAsync(to + round.first * row_bytes, from,
                                 static_cast<size_t>(round.count * row_bytes),
                                 cudaMemcpyDeviceToHost, copies_out_.get()));
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
  Event settled_;
};

}  // namespace

std::shared_ptr<DeviceStager> make_device_stager(int device, int64_t slot_bytes, int num_slots) {
  checked_device(device);
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

void gather_on_device(int device, const std::vector<RowArray>& arrays, const int64_t* row_ids,
                      int64_t count, const std::vector<std::byte*>& packed) {
  RowCopies rows{};
  rows.row_ids = row_ids;
  rows.count = count;
  Launches launches(rows);
  for (size_t i = 0; i < arrays.size(); ++i) launches.add(copy_of(arrays[i], packed[i]));
  const DeviceGuard guard(device);
  if (count > 0) launches.submit<true>(stream_of(device));
}

}  // namespace cpr_ext
