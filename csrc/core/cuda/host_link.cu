#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "core/cuda/host_link.h"
#include "core/error.h"

namespace cpr_ext {

HostLink& HostLink::of(int device) {
  static std::mutex mutex;
  static auto* const links = new std::map<int, std::unique_ptr<HostLink>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<HostLink>& link = (*links)[device];
  if (!link) {
    const DeviceGuard guard(device);
    link.reset(new HostLink(device));
  }
  return *link;
}

void HostLink::upload(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (is_capturing(stream)) {  // it would upload what is in the blocks then, at each replay
    throw UsageError("rows cannot be named to a device while a CUDA graph is captured");
  }
  std::lock_guard<std::mutex> lock(up_mutex_);
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const auto size = static_cast<size_t>(std::min(kBlockBytes, bytes - begin));
    const int i = std::exchange(next_up_, (next_up_ + 1) % kNumBlocks);
    up_.done[i].wait();
    std::memcpy(up_.block(i), static_cast<const std::byte*>(from) + begin, size);
    CPR_EXT_CUDA(cudaMemcpyAsync(static_cast<std::byte*>(to) + begin, up_.block(i), size,
                                 cudaMemcpyHostToDevice, stream));
    up_.done[i].record(stream);
  }
}

void HostLink::download(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(down_mutex_);
  ready_.record(stream);
  ready_.block(side_.get());
  download_locked(to, from, bytes);
}

void HostLink::download(void* to, const void* from, int64_t bytes, Event& event) {
  std::lock_guard<std::mutex> lock(down_mutex_);
  event.block(side_.get());
  download_locked(to, from, bytes);
}

// REQUIRES: down_mutex_ is held, and the side stream waits for what is in `from`. Every block is
// read before it returns; what an error left on its way comes before, on the same stream.
void HostLink::download_locked(void* to, const void* from, int64_t bytes) {
  const int64_t num_pieces = (bytes + kBlockBytes - 1) / kBlockBytes;
  const auto size = [&](int64_t piece) {
    return static_cast<size_t>(std::min(kBlockBytes, bytes - piece * kBlockBytes));
  };
  for (int64_t piece = 0; piece < num_pieces + kNumBlocks - 1; ++piece) {
    if (piece < num_pieces) {
      const int i = static_cast<int>(piece % kNumBlocks);
      CPR_EXT_CUDA(cudaMemcpyAsync(down_.block(i),
                                   static_cast<const std::byte*>(from) + piece * kBlockBytes,
                                   size(piece), cudaMemcpyDeviceToHost, side_.get()));
      down_.done[i].record(side_.get());
    }
    const int64_t arrived = piece - (kNumBlocks - 1);  // the oldest one on its way
    if (arrived < 0 || arrived >= num_pieces) continue;
    const int i = static_cast<int>(arrived % kNumBlocks);
    down_.done[i].wait();
    std::memcpy(static_cast<std::byte*>(to) + arrived * kBlockBytes, down_.block(i), size(arrived));
  }
}

HostLink::HostLink(int device) : device_(device) {
  for (int i = kNumSlots - 1; i >= 0; --i) free_slots_.push_back(slots_.data() + i * kSlotBytes);
  std::thread([this] { run_later(); }).detach();
}

std::future<void> HostLink::later(std::function<void()> work) {
  std::packaged_task<void()> task([this, work = std::move(work)] {
    const DeviceGuard guard(device_);  // its error is the task's: it must not end the process
    work();
  });
  std::future<void> done = task.get_future();
  std::lock_guard<std::mutex> lock(later_mutex_);
  later_.push_back(std::move(task));
  is_later_.notify_one();
  return done;
}

void HostLink::run_later() {
  for (;;) {
    std::unique_lock<std::mutex> lock(later_mutex_);
    is_later_.wait(lock, [this] { return !later_.empty(); });
    std::packaged_task<void()> task = std::move(later_.front());
    later_.pop_front();
    lock.unlock();
    task();
  }
}

EarlyDownload::~EarlyDownload() {
  if (slot_ == nullptr) return;
  try {
    if (!is_known_to_have_arrived_) arrived_->wait();
  } catch (const CudaError&) {  // nothing will arrive any more
  }
  std::lock_guard<std::mutex> lock(link_->down_mutex_);
  link_->free_slots_.push_back(slot_);
}

void EarlyDownload::begin(int device, const void* from, int64_t bytes, Event& event) {
  if (bytes > HostLink::kSlotBytes) return;
  link_ = &HostLink::of(device);
  std::lock_guard<std::mutex> lock(link_->down_mutex_);
  if (link_->free_slots_.empty()) return;
  arrived_.emplace();
  std::byte* const slot = link_->free_slots_.back();
  const cudaStream_t side = link_->side_.get();
  event.block(side);
  CPR_EXT_CUDA(
      cudaMemcpyAsync(slot, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, side));
  arrived_->record(side);
  link_->free_slots_.pop_back();
  slot_ = slot;
}

bool EarlyDownload::has_arrived() {
  is_known_to_have_arrived_ = is_known_to_have_arrived_ || arrived_->is_done();
  return is_known_to_have_arrived_;
}

const std::byte* EarlyDownload::read() {
  if (!is_known_to_have_arrived_) arrived_->wait();
  is_known_to_have_arrived_ = true;
  return slot_;
}

}  // namespace cpr_ext
