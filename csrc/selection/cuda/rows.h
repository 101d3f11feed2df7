// top_rows of scores that lie on a device; for *.cu only.
#pragma once

#include <cstdint>
#include <future>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/row_id_vector.h"
#include "selection/cuda/scores.h"

namespace cpr_ext {

// Row ids on the device, ascending, and how many there are, or will be.
class DeviceRows {
 public:
  // As top_rows of scores (num_rows,), with first_row_id added to every row id; on `stream`, for
  // which it allocates 8 bytes per row that may be chosen, and a fourth of a byte per row.
  // The caller returns before the rows are known. They are copied to the host as soon as they are,
  // so that nobody has to wait for them.
  // Scores: one of cuda/scores.h. REQUIRES: the device is current.
  template <class Scores>
  DeviceRows(const Scores& scores, int64_t num_rows, int64_t k, int64_t first_row_id,
             cudaStream_t stream);
  ~DeviceRows();

  bool is_ready();

  // Waits for the stream, but only for the rows; the stream goes on while they are copied.
  RowIdVector read(int device);

  int64_t num_rows() const { return num_rows_; }  // those that read() returned; 0 before
  const int64_t* ids_on_device() const { return found_.as<int64_t>() + 1; }  // (num_rows)

 private:
  template <class Scores>
  void choose(const Scores& scores, int64_t num_rows, int64_t first_row_id, cudaStream_t stream);
  RowIdVector download(int device);

  int64_t most_rows_ = 0;
  int64_t num_rows_ = 0;
  StreamMemory found_;  // how many there are, then their ids (<= most_rows_), int64
  Event chosen_;
  EarlyDownload early_;        // of few
  std::future<void> arrived_;  // of more: they are in ids_ then
  RowIdVector ids_;
};

}  // namespace cpr_ext
