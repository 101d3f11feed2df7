#include "pipeline/snapshot_pipeline.h"

#include "core/error.h"
#include "core/process.h"

namespace cpr_ext {

SnapshotPipeline::SnapshotPipeline(int num_slots, int64_t slot_bytes,
                                   std::shared_ptr<ThreadPool> threads,
                                   std::vector<std::shared_ptr<DeviceStager>> stagers)
    : stagers_(std::move(stagers)),
      slots_(num_slots, slot_bytes),
      pinned_(slots_, stagers_.empty() ? nullptr : stagers_.front().get()),
      threads_(std::move(threads)) {
  if (num_slots < 2) {
    throw UsageError("num_slots is " + std::to_string(num_slots) +
                     "; double buffering needs at least 2");
  }
  checker_thread_ = std::thread([this] { checker_loop(); });
  try {
    writer_thread_ = std::thread([this] { writer_loop(); });
  } catch (...) {
    to_check_.close();
    checker_thread_.join();
    throw;
  }
}

SnapshotPipeline::~SnapshotPipeline() {
  to_check_.close();
  checker_thread_.join();
  to_write_.close();
  writer_thread_.join();
}

std::shared_ptr<SegmentJob> SnapshotPipeline::start(CapturePlan plan) {
  return std::shared_ptr<SegmentJob>(new SegmentJob(*this, std::move(plan)), DeleteInCreator());
}

void SnapshotPipeline::Queue::push(Work&& work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

bool SnapshotPipeline::Queue::pop(Work* work) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  *work = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void SnapshotPipeline::Queue::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
  }
  wake_.notify_all();
}

void SnapshotPipeline::checker_loop() {
  for (;;) {
    Work work;  // of each turn its own: the job must not be kept alive while this waits
    if (!to_check_.pop(&work)) return;
    {
      const WorkLog::Span span(log_, "check");
      work.job->check(&work.filled);
    }
    try {
      to_write_.push(std::move(work));
    } catch (...) {  // no memory for the queue: the slot must end nevertheless
      work.job->write(std::move(work.filled));
    }
  }
}

void SnapshotPipeline::writer_loop() {
  for (;;) {
    Work work;
    if (!to_write_.pop(&work)) return;
    const WorkLog::Span span(log_, "write");
    work.job->write(std::move(work.filled));
  }
}

}  // namespace cpr_ext
