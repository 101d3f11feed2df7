#include <algorithm>
#include <chrono>

#include "core/cuda/host_link.h"
#include "selection/cuda/rows.h"
#include "selection/cuda/top_rows.h"

namespace cpr_ext {

namespace {

// The cut is the lowest score that is chosen. All that a selection must know of a row is whether it
// lies above the cut, or at it: two bits. One pass over the scores notes them and counts them for
// each part of the rows, which is one block's; then all know where their rows go, and write them
// from the bits, which take a sixteenth of the scores' memory.
//
// The cut is guessed where it can be: see scores.h. If there is no guess, or the counts show that
// it was wrong, a histogram finds it, as in top_rows.cpp. What the host decides there between two
// passes, kernels decide here: all are launched at once, and one that is not needed returns at
// once.
//
// Pass 0 of the histogram has one bin per count, the last one for all above: counts are mostly
// small, so that it usually is the only one. Else passes 1 to 3 are a radix selection with 10, 11
// and 11 bits.
constexpr int kNumBins = 2048;
constexpr int kNumPasses = 4;
constexpr int kThreads = 256;
constexpr int kWriters = 128;  // threads of a block that writes rows
constexpr int kBinsPerThread = kNumBins / kThreads;
constexpr int64_t kMostParts = 1024;
constexpr int64_t kFewestRowsPerPart = 16384;
constexpr int kPartsPerThread = static_cast<int>(kMostParts) / kThreads;
constexpr int kTileRows = kThreads * kRowsPerLoad;
constexpr int kWarpRows = 32 * kRowsPerLoad;
constexpr int kLoads = 4;        // of a thread, on their way at once
constexpr int kBlocksPerSm = 6;  // or the last block's work takes registers that all need
constexpr unsigned kAllLanes = 0xffffffffu;

using Count = unsigned long long;

struct Pass {
  Count bins[kNumBins];
  unsigned num_done;   // blocks
  unsigned is_needed;  // pass 0 is unless the guess was right
  uint32_t prefix;     // of the keys counted
  Count wanted;        // rows of those keys
};

// All zero before the first kernel.
struct State {
  Pass passes[kNumPasses];
  uint32_t cut;         // that the histogram has found
  Count guessed_above;  // rows above the guessed cut
  Count guessed_at;
};

// Of the 128 rows of a warp's load: bit n of word i is row kRowsPerLoad * n + i.
struct CutBits {
  uint32_t above[kRowsPerLoad];
  uint32_t at[kRowsPerLoad];
};
static_assert(sizeof(CutBits) == 32, "what a GPU writes at once");

struct Part {
  uint32_t above;
  uint32_t at;
  uint32_t ties;  // of those at the cut, the first so many are chosen
  Count first;    // where its rows go in the result
};

// The rows that each block sees.
struct Rows {
  int64_t size;
  int64_t per_part;
  int lead;  // of the scores: the first part begins below row zero

  __device__ int64_t begin() const { return blockIdx.x * per_part - lead; }
  __device__ int64_t warp_of(int64_t row) const { return (row + lead) / kWarpRows; }
  __device__ int64_t end() const { return begin() + per_part < size ? begin() + per_part : size; }
};

// Bin of a key in a pass; kNumBins: not counted. A key of zero never is.
template <int kPass>
__device__ uint32_t bin_of(uint32_t key, uint32_t prefix) {
  if (key == 0) return kNumBins;
  if (kPass == 0) return key < kNumBins - 1 ? key : kNumBins - 1;
  if (kPass == 1) return key >> 22;
  const uint32_t bin = (kPass == 2 ? key >> 11 : key) ^ (prefix << 11);
  return bin < kNumBins ? bin : kNumBins;  // under another prefix a high bit is left
}

// Shared memory lies in plain functions: there the emulated device finds it.
__device__ Count* sums_of_warps() {
  __shared__ Count sums[kThreads / 32];
  return sums;
}

struct BlockBins {
  uint32_t bins[kNumBins];
  unsigned is_last_block;
};

__device__ BlockBins& bins_of_block() {
  __shared__ BlockBins bins;
  return bins;
}

// Chosen rows of a warp's tile, by their place in it.
struct WarpIds {
  uint16_t ids[32 * kWarpRows];
};

__device__ WarpIds* ids_of_warps() {
  __shared__ WarpIds ids[kWriters / 32];
  return ids;
}

// Sum over the threads before this one; `total` gets that of all. Every thread calls it.
template <int kBlockThreads, class T>
__device__ T sum_before(T value, T* total) {
  Count* const of_warps = sums_of_warps();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  T sum = value;
  for (int delta = 1; delta < 32; delta *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, delta);
    if (lane >= delta) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  T before = 0;
  *total = 0;
  for (int i = 0; i < kBlockThreads / 32; ++i) {
    if (i < warp) before += static_cast<T>(of_warps[i]);
    *total += static_cast<T>(of_warps[i]);
  }
  __syncthreads();  // of_warps may be used again
  return before + sum - value;
}

// Calls note(keys, warp_row) for each load of a warp's 128 rows; all lanes are in it.
template <class Scores, class Note>
__device__ void for_each_load(const Scores& scores, const Rows& rows, const Note& note) {
  const int64_t end = rows.end();
  const int in_warp = static_cast<int>(threadIdx.x % 32) * kRowsPerLoad;
  int64_t warp_row = rows.begin() + threadIdx.x * kRowsPerLoad - in_warp;
  for (; warp_row + (kLoads - 1) * kTileRows + kWarpRows <= end; warp_row += kLoads * kTileRows) {
    uint32_t keys[kLoads][kRowsPerLoad];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      scores.load_keys(warp_row + in_warp + i * kTileRows, end, keys[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) note(keys[i], warp_row + i * kTileRows);
  }
  for (; warp_row < end; warp_row += kTileRows) {
    uint32_t keys[kRowsPerLoad];
    scores.load_keys(warp_row + in_warp, end, keys);
    note(keys, warp_row);
  }
}

// Whether the guess is the cut, of the k rows that are wanted. Of all rows with a score (a guess of
// 1) there may be fewer.
__device__ bool is_right(const State& state, uint32_t guess, Count k) {
  const Count above = state.guessed_above;
  return above <= k && (above + state.guessed_at >= k || guess == 1);
}

// Notes which rows lie above the cut and at it: the guessed one, or else that of the histogram,
// unless the guess was right. grid: one block per part.
template <class Scores, bool kIsGuess>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    note_cut_kernel(Scores scores, Rows rows, State* state, CutBits* bits, Part* parts, Count k) {
  if (!kIsGuess && has_guess<Scores>() && is_right(*state, guess_of(scores), k)) return;
  const uint32_t cut = kIsGuess ? guess_of(scores) : state->cut;
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t counted = 0;  // by lanes 0 to 3 above the cut, by lanes 4 to 7 at it
  for_each_load(scores, rows, [&](const uint32_t* keys, int64_t warp_row) {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLoad; ++i) {
      const uint32_t above = __ballot_sync(kAllLanes, keys[i] > cut);
      const uint32_t at = __ballot_sync(kAllLanes, keys[i] == cut);
      if (lane == i) mine = above;
      if (lane == i + kRowsPerLoad) mine = at;
    }
    counted += static_cast<uint32_t>(__popc(mine));
    if (lane >= 2 * kRowsPerLoad) return;
    reinterpret_cast<uint32_t*>(bits + rows.warp_of(warp_row))[lane] = mine;
  });
  Count total;
  sum_before<kThreads>(lane < kRowsPerLoad ? Count{counted} : Count{counted} << 32, &total);
  if (threadIdx.x != 0) return;
  const auto above = static_cast<uint32_t>(total);
  const auto at = static_cast<uint32_t>(total >> 32);
  parts[blockIdx.x] = {above, at, 0, 0};
  if (!kIsGuess) return;
  atomicAdd(&state->guessed_above, Count{above});
  atomicAdd(&state->guessed_at, Count{at});
}

// Finds the bin that holds the cut. Every thread of one block calls it.
__device__ void open_bin(State* state, int number, Count k) {
  Pass& pass = state->passes[number];
  const Count sought = number == 0 ? k : pass.wanted;  // before any thread changes it
  const int highest = kNumBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
  Count sizes[kBinsPerThread];
  Count mine = 0;
  for (int i = 0; i < kBinsPerThread; ++i) {
    // Other blocks have added to it since this one may have had the line in its cache.
    sizes[i] = *static_cast<const volatile Count*>(&pass.bins[highest - i]);
    mine += sizes[i];
  }
  Count total;
  Count above = sum_before<kThreads>(mine, &total);
  const Count wanted = sought < total ? sought : total;
  if (wanted == 0) {  // no row has a score, and none has the highest
    if (threadIdx.x == 0) state->cut = 0xffffffffu;
    return;
  }
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = highest - i;
    const Count size = sizes[i];
    if (above < wanted && wanted <= above + size) {  // in one thread, for one bin
      const bool takes_all = wanted - above == size;
      const bool is_one_key = number == kNumPasses - 1 || (number == 0 && bin < kNumBins - 1);
      if (takes_all || is_one_key) {
        const int shift = number == 1 ? 22 : number == 2 ? 11 : 0;
        const uint32_t prefix = number < 2 ? 0 : pass.prefix << 11;
        state->cut = (prefix | static_cast<uint32_t>(bin)) << shift;
      } else {
        Pass& next = state->passes[number + 1];
        next.is_needed = 1;
        next.prefix = number == 0 ? 0 : (number == 1 ? 0 : pass.prefix << 11) | bin;
        next.wanted = number == 0 ? wanted : wanted - above;  // the radix selection begins anew
      }
    }
    above += size;
  }
}

// grid: one block per part.
template <class Scores, int kPass>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    count_bins_kernel(Scores scores, Rows rows, State* state, Count k) {
  uint32_t* const bins = bins_of_block().bins;
  unsigned& is_last_block = bins_of_block().is_last_block;
  Pass& pass = state->passes[kPass];
  if (kPass > 0 && pass.is_needed == 0) return;
  if (kPass == 0 && has_guess<Scores>() && is_right(*state, guess_of(scores), k)) return;
  for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const uint32_t prefix = pass.prefix;
  for_each_load(scores, rows, [&](const uint32_t* keys, int64_t) {
    for (int i = 0; i < kRowsPerLoad; ++i) {
      const uint32_t bin = bin_of<kPass>(keys[i], prefix);
      if (bin < kNumBins) atomicAdd(&bins[bin], 1u);
    }
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) {
    if (bins[bin] != 0) atomicAdd(&pass.bins[bin], static_cast<Count>(bins[bin]));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last_block = atomicAdd(&pass.num_done, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (is_last_block == 0) return;
  __threadfence();
  open_bin(state, kPass, k);
}

// Where each part's rows go. grid: one block. last_cut: null, or what is guessed next.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const State* state, Part* parts, int num_parts, Count k, uint32_t* last_cut,
                 int64_t* num_rows) {
  const int begin = static_cast<int>(threadIdx.x) * kPartsPerThread;
  const int end = begin + kPartsPerThread < num_parts ? begin + kPartsPerThread : num_parts;
  Count mine = 0;
  for (int i = begin; i < end; ++i) mine += parts[i].above;
  Count all_above;
  sum_before<kThreads>(mine, &all_above);
  mine = 0;
  for (int i = begin; i < end; ++i) mine += parts[i].at;
  Count all_at;
  Count at_before = sum_before<kThreads>(mine, &all_at);
  const Count num_ties = k - all_above;  // the cut is such that no more than k lie above it
  mine = 0;
  for (int i = begin; i < end; ++i) {
    const Count left = at_before < num_ties ? num_ties - at_before : 0;
    at_before += parts[i].at;
    parts[i].ties = left < parts[i].at ? static_cast<uint32_t>(left) : parts[i].at;
    mine += parts[i].above + parts[i].ties;
  }
  Count total;
  Count first = sum_before<kThreads>(mine, &total);
  for (int i = begin; i < end; ++i) {
    parts[i].first = first;
    first += parts[i].above + parts[i].ties;
  }
  if (threadIdx.x != 0) return;
  *num_rows = static_cast<int64_t>(total);
  const bool was_wrong = state->cut != 0;
  if (last_cut == nullptr || !was_wrong || total == 0) return;
  *last_cut = total < k ? 1 : state->cut;  // fewer than k have a score: all of them are chosen
}

// Bit 0 of eight becomes bit 0, bit 1 bit 4, and so on.
__device__ uint32_t spread(uint32_t bits) {
  bits = (bits | bits << 12) & 0x000f000fu;
  bits = (bits | bits << 6) & 0x03030303u;
  return (bits | bits << 3) & 0x11111111u;
}

// Of 128 rows, as in CutBits.
struct RowBits {
  uint32_t words[kRowsPerLoad];

  __device__ uint32_t count() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLoad; ++i) found += static_cast<uint32_t>(__popc(words[i]));
    return found;
  }

  __device__ void keep_first(uint32_t left) {
    for (int n = 0; n < 32; ++n) {
#pragma unroll
      for (int i = 0; i < kRowsPerLoad; ++i) {
        const uint32_t bit = words[i] & 1u << n;
        if (bit == 0) continue;
        if (left == 0) words[i] &= ~bit;
        if (left > 0) --left;
      }
    }
  }

  // Rows 32 * number to 32 * number + 31, in their order.
  __device__ uint32_t in_order(int number) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLoad; ++i) found |= spread(words[i] >> 8 * number & 0xffu) << i;
    return found;
  }
};

__device__ RowBits load_bits(const uint32_t* words) {
  const uint4 four = *reinterpret_cast<const uint4*>(words);
  return {{four.x, four.y, four.z, four.w}};
}

// Those of this thread that are chosen. before: rows at the cut in earlier tiles of the part. Every
// thread of the block calls it.
__device__ RowBits chosen_bits(const CutBits* bits, const Part& part, uint32_t* before) {
  RowBits above{};
  RowBits at{};
  if (bits != nullptr) {
    above = load_bits(bits->above);
    at = load_bits(bits->at);
  }
  if (part.ties < part.at) {  // in most parts all or none are chosen
    const uint32_t mine = part.ties > 0 ? at.count() : 0;
    uint32_t total = 0;
    const uint32_t first = *before + (part.ties > 0 ? sum_before<kWriters>(mine, &total) : 0);
    *before += total;
    if (first >= part.ties) return above;
    if (part.ties - first < mine) at.keep_first(part.ties - first);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerLoad; ++i) above.words[i] |= at.words[i];
  return above;
}

// Writes a part's rows, 128 of them per thread at a time. A warp collects its own in shared memory,
// so that they leave side by side. grid: one block per part.
__global__ void __launch_bounds__(kWriters, kBlocksPerSm)
    write_kernel(Rows rows, const Part* parts, const CutBits* bits, int64_t first_row_id,
                 int64_t* row_ids) {
  const Part part = parts[blockIdx.x];
  if (part.above + part.ties == 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  uint16_t* const ids = ids_of_warps()[warp].ids;
  const int64_t end = rows.warp_of(rows.end() - 1) + 1;
  Count place = part.first;
  uint32_t ties_before = 0;
  for (int64_t tile = rows.warp_of(rows.begin()); tile < end; tile += kWriters) {
    const int64_t mine = tile + threadIdx.x;
    const RowBits chosen = chosen_bits(mine < end ? bits + mine : nullptr, part, &ties_before);
    const uint32_t count = chosen.count();
    uint32_t total;
    const uint32_t before = sum_before<kWriters>(count, &total);
    const uint32_t of_warp = __shfl_sync(kAllLanes, before, 0);
    const uint32_t in_warp = __shfl_sync(kAllLanes, before + count, 31) - of_warp;
    uint32_t next = before - of_warp;
#pragma unroll
    for (int number = 0; number < kRowsPerLoad; ++number) {
      for (uint32_t left = chosen.in_order(number); left != 0; left &= left - 1) {
        ids[next++] = static_cast<uint16_t>(lane * kWarpRows + number * 32 +
                                            __ffs(static_cast<int>(left)) - 1);
      }
    }
    __syncwarp();
    const int64_t row = first_row_id - rows.lead + (tile + warp * 32) * kWarpRows;
    for (uint32_t i = lane; i < in_warp; i += 32) row_ids[place + of_warp + i] = row + ids[i];
    place += total;
    __syncthreads();  // ids may be written again
  }
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <class Scores>
void launch_histogram(const Scores& scores, const Rows& rows, int64_t num_parts, State* state,
                      Count k, cudaStream_t stream) {
  constexpr decltype(&count_bins_kernel<Scores, 0>) kPasses[kNumPasses] = {
      count_bins_kernel<Scores, 0>, count_bins_kernel<Scores, 1>, count_bins_kernel<Scores, 2>,
      count_bins_kernel<Scores, 3>};
  for (const auto& pass : kPasses) {
    CPR_EXT_LAUNCH(pass, num_parts, kThreads, stream, scores, rows, state, k);
  }
}

}  // namespace

template <class Scores>
DeviceRows::DeviceRows(const Scores& scores, int64_t num_rows, int64_t k, int64_t first_row_id,
                       cudaStream_t stream) {
  most_rows_ = std::clamp<int64_t>(k, 0, num_rows);
  const int64_t bytes = (1 + most_rows_) * static_cast<int64_t>(sizeof(int64_t));
  found_ = StreamMemory(bytes, stream);
  CPR_EXT_CUDA(cudaMemsetAsync(found_.as<void>(), 0, sizeof(int64_t), stream));
  if (most_rows_ > 0) choose(scores, num_rows, first_row_id, stream);
  chosen_.record(stream);
  const int device = DeviceGuard::device();
  early_.begin(device, found_.as<void>(), bytes, chosen_);
  if (early_.is_begun() || is_capturing(stream)) return;
  arrived_ = HostLink::of(device).later([this, device] {
    chosen_.wait();  // before it has the link to the host, which others use meanwhile
    ids_ = download(device);
  });
}

DeviceRows::~DeviceRows() {
  if (arrived_.valid()) arrived_.wait();
}

bool DeviceRows::is_ready() {
  if (!arrived_.valid()) return chosen_.is_done() && (!early_.is_begun() || early_.has_arrived());
  return arrived_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

template <class Scores>
void DeviceRows::choose(const Scores& scores, int64_t num_rows, int64_t first_row_id,
                        cudaStream_t stream) {
  const int64_t all_rows = num_rows + scores.lead();
  // No more than run at once: a few blocks that come later would take as long as all before.
  const int64_t most_parts =
      std::min<int64_t>(kMostParts, num_multiprocessors(DeviceGuard::device()) * kBlocksPerSm);
  const int64_t wanted_parts =
      std::min(most_parts, (all_rows + kFewestRowsPerPart - 1) / kFewestRowsPerPart);
  const int64_t rows_per_part = round_up((all_rows + wanted_parts - 1) / wanted_parts, kTileRows);
  const int64_t num_parts = (all_rows + rows_per_part - 1) / rows_per_part;
  const Rows rows{num_rows, rows_per_part, scores.lead()};
  const auto k = static_cast<Count>(most_rows_);
  const StreamMemory state_memory(sizeof(State), stream);
  const StreamMemory part_memory(num_parts * static_cast<int64_t>(sizeof(Part)), stream);
  const StreamMemory bit_memory(
      num_parts * rows_per_part / kWarpRows * static_cast<int64_t>(sizeof(CutBits)), stream);
  auto* const state = state_memory.as<State>();
  auto* const parts = part_memory.as<Part>();
  auto* const bits = bit_memory.as<CutBits>();
  CPR_EXT_CUDA(cudaMemsetAsync(state, 0, sizeof(State), stream));
  if constexpr (has_guess<Scores>()) {
    const auto guess = note_cut_kernel<Scores, true>;
    CPR_EXT_LAUNCH(guess, num_parts, kThreads, stream, scores, rows, state, bits, parts, k);
  }
  if constexpr (Scores::kGuess != Guess::kCertain) {
    launch_histogram(scores, rows, num_parts, state, k, stream);
    const auto note = note_cut_kernel<Scores, false>;
    CPR_EXT_LAUNCH(note, num_parts, kThreads, stream, scores, rows, state, bits, parts, k);
  }
  CPR_EXT_LAUNCH(place_kernel, 1, kThreads, stream, state, parts, static_cast<int>(num_parts), k,
                 last_cut_of(scores), found_.as<int64_t>());
  CPR_EXT_LAUNCH(write_kernel, num_parts, kWriters, stream, rows, parts, bits, first_row_id,
                 found_.as<int64_t>() + 1);
}

template DeviceRows::DeviceRows(const StoredScores&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const StoredCounts&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const SetBits&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const BitsInTurn&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const RandomScores&, int64_t, int64_t, int64_t, cudaStream_t);

RowIdVector DeviceRows::read(int device) {
  RowIdVector row_ids;
  if (early_.is_begun()) {
    const auto* const found = reinterpret_cast<const int64_t*>(early_.read());
    row_ids.assign(found + 1, found + 1 + *found);
  } else if (arrived_.valid()) {
    arrived_.get();
    row_ids = std::move(ids_);
  } else {
    row_ids = download(device);
  }
  num_rows_ = static_cast<int64_t>(row_ids.size());
  return row_ids;
}

RowIdVector DeviceRows::download(int device) {
  int64_t num_rows = 0;
  HostLink& link = HostLink::of(device);
  link.download(&num_rows, found_.as<void>(), sizeof(num_rows), chosen_);
  RowIdVector row_ids(static_cast<size_t>(num_rows));
  link.download(row_ids.data(), ids_on_device(), num_rows * int64_t{sizeof(int64_t)}, chosen_);
  return row_ids;
}

RowIdVector device_top_rows(int device, const uint32_t* scores, int64_t num_rows, int64_t k) {
  const DeviceGuard guard(device);
  return DeviceRows(StoredScores{scores}, num_rows, k, 0, stream_of(device)).read(device);
}

}  // namespace cpr_ext
