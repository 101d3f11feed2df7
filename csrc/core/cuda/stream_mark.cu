#include "core/cuda/device.h"
#include "core/stream_mark.h"

namespace cpr_ext {

namespace {

class EventMark final : public StreamMark {
 public:
  explicit EventMark(int device) { event_.record(stream_of(device)); }
  bool is_passed() override { return event_.is_done(); }
  void wait() override { event_.wait(); }

 private:
  Event event_;
};

}  // namespace

std::unique_ptr<StreamMark> mark_stream(int device) {
  const DeviceGuard guard(device);
  return std::make_unique<EventMark>(device);
}

}  // namespace cpr_ext
