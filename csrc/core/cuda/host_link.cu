#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "core/cuda/host_link.h"

namespace cpr_ext {

HostLink& HostLink::of(int device) {
  static std::mutex mutex;
  static auto* const links = new std::map<int, std::unique_ptr<HostLink>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<HostLink>& link = (*links)[device];
  if (!link) {
    const DeviceGuard guard(device);
    link.reset(new HostLink);
  }
  return *link;
}

void HostLink::upload(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
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

}  // namespace cpr_ext
