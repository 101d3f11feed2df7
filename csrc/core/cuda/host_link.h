// Copies between ordinary host memory and a device; for *.cu only.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <vector>

#include "core/cuda/device.h"

namespace cpr_ext {

// Through a few pinned blocks for each direction, so that neither the caller nor the stream waits
// for more than those, and no direction for the other.
class HostLink {
 public:
  // Of this device, made when first asked for; it lives as long as the process.
  static HostLink& of(int device);

  // When it returns `from` may be changed; the bytes are in `to` when `stream` gets here.
  // Throws UsageError if that captures a graph.
  void upload(void* to, const void* from, int64_t bytes, cudaStream_t stream);

  // What lies in `from` when `stream` gets here, or got to `event`. Waits for it; the stream goes
  // on meanwhile.
  void download(void* to, const void* from, int64_t bytes, cudaStream_t stream);
  void download(void* to, const void* from, int64_t bytes, Event& event);

  // Does `work`, which may download, on a thread of this link, one after the other; what it throws
  // is in the future. The caller waits for it before anything goes that it uses.
  std::future<void> later(std::function<void()> work);

 private:
  friend class EarlyDownload;
  void run_later();

  static constexpr int kNumBlocks = 4;
  static constexpr int64_t kBlockBytes = 1 << 20;
  static constexpr int kNumSlots = 256;
  static constexpr int64_t kSlotBytes = 1 << 15;

  // Pinned memory, each block with the event after its last copy.
  struct Blocks {
    std::byte* block(int i) { return memory.data() + i * kBlockBytes; }

    PinnedMemory memory{kNumBlocks * kBlockBytes};
    std::array<Event, kNumBlocks> done;
  };

  explicit HostLink(int device);  // the current one; its thread ends with the process
  void download_locked(void* to, const void* from, int64_t bytes);

  const int device_;

  std::mutex up_mutex_;  // guards the two below
  Blocks up_;
  int next_up_ = 0;
  std::mutex down_mutex_;  // guards all below
  Blocks down_;
  Event ready_;
  SideStream side_;
  PinnedMemory slots_{kNumSlots * kSlotBytes};  // of early downloads
  std::vector<std::byte*> free_slots_;
  std::mutex later_mutex_;  // guards all below
  std::condition_variable is_later_;
  std::deque<std::packaged_task<void()>> later_;
};

// A small copy to the host that arrives by itself, so that nobody has to wait for it.
class EarlyDownload {
 public:
  EarlyDownload() = default;
  ~EarlyDownload();  // waits until it has arrived
  EarlyDownload(const EarlyDownload&) = delete;
  EarlyDownload& operator=(const EarlyDownload&) = delete;

  // Copies what lies in `from` when a stream got to `event`; does nothing if that is too much, or
  // too many are on their way. REQUIRES: `from` stays until it has arrived.
  void begin(int device, const void* from, int64_t bytes, Event& event);

  bool is_begun() const { return slot_ != nullptr; }
  bool has_arrived();
  const std::byte* read();  // waits for it; the bytes stay as long as this lives

 private:
  HostLink* link_ = nullptr;
  std::byte* slot_ = nullptr;
  std::optional<Event> arrived_;
  bool is_known_to_have_arrived_ = false;
};

}  // namespace cpr_ext
