#include "pipeline/snapshot_pipeline.h"

#include "core/error.h"
#include "core/process.h"

namespace cpr_ext {

SnapshotPipeline::SnapshotPipeline(int num_slots, int64_t slot_bytes, int64_t keep_bytes,
                                   std::shared_ptr<ThreadPool> threads)
    : slots_(num_slots, slot_bytes), keep_arena_(keep_bytes), threads_(std::move(threads)) {
  if (keep_bytes < 0) {
    throw UsageError("keep_bytes is " + std::to_string(keep_bytes) + "; it must not be negative");
  }
  if (num_slots < 2) {
    throw UsageError("num_slots is " + std::to_string(num_slots) +
                     "; double buffering needs at least 2");
  }
  writer_thread_ = std::thread([this] { writer_loop(); });
}

SnapshotPipeline::~SnapshotPipeline() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  writer_thread_.join();
}

std::shared_ptr<SegmentJob> SnapshotPipeline::start(CapturePlan plan) {
  return std::shared_ptr<SegmentJob>(new SegmentJob(*this, std::move(plan)), DeleteInCreator());
}

void SnapshotPipeline::enqueue(Work work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void SnapshotPipeline::writer_loop() {
  for (;;) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work.job->write(std::move(work.filled));
  }
}

}  // namespace cpr_ext
