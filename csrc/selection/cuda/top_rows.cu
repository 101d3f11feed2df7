#include <algorithm>

#include "core/cuda/host_link.h"
#include "selection/cuda/rows.h"
#include "selection/cuda/top_rows.h"

namespace cpr_ext {

namespace {

// As in top_rows.cpp: the rows are divided into parts, here one per block, and a histogram per part
// shows where the threshold is and how many rows each part gives. What the host decides there
// between two passes, the block that ends last decides here: all passes are launched at once, and
// one that is not needed returns at once.
//
// Pass 0 has one bin per count, the last one for all above: counts are mostly small, so that it
// usually is the only one. Else passes 1 to 3 are a radix selection with 10, 11 and 11 bits.
constexpr int kNumBins = 2048;
constexpr int kNumPasses = 4;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
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
  unsigned is_needed;  // pass 0 always is
  uint32_t prefix;     // of the keys counted
  unsigned open;       // the bin that holds the threshold
  Count wanted;        // rows of the open bin
  unsigned is_last;
};

// All zero before the first pass.
struct State {
  Pass passes[kNumPasses];
  uint32_t last;  // the threshold: all keys above `last`, and the first num_ties equal to it
  Count num_ties;
  Count num_rows;       // chosen
  uint32_t cut;         // the lowest key of the open bin
  unsigned is_guessed;  // CutBits are of `cut`
};

// Which of a warp's rows have a key above the guessed cut, and which have it: bit n of word i is
// row kRowsPerLoad * n + i. Pass 0 notes it for all rows. If the guess was right, so mostly, the
// rows are written from these, which take a sixteenth of the scores' memory, and no score is read
// again.
struct CutBits {
  uint32_t above[kRowsPerLoad];
  uint32_t at[kRowsPerLoad];
};
static_assert(sizeof(CutBits) == 32, "what a GPU reads at once");

// Per part; see Threshold in radix_threshold.h.
struct Part {
  Count above;
  Count equal;
  Count first;  // where its rows go in the result
  Count ties;
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
  __shared__ Count sums[kWarps];
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

// Sum over the threads before this one; `total` gets that of all. Every thread calls it.
template <class T>
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
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += static_cast<T>(of_warps[i]);
    *total += static_cast<T>(of_warps[i]);
  }
  __syncthreads();  // of_warps may be used again
  return before + sum - value;
}

// Finds the bin that holds the threshold. Every thread of one block calls it.
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
  Count above = sum_before(mine, &total);
  const Count wanted = sought < total ? sought : total;
  if (wanted == 0) {  // no row has a score: nothing is above the highest key
    if (threadIdx.x == 0) state->last = 0xffffffffu;
    return;
  }
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = highest - i;
    const Count size = sizes[i];
    if (above < wanted && wanted <= above + size) {  // in one thread, for one bin
      const bool takes_all = wanted - above == size;
      pass.open = bin;
      pass.wanted = wanted - above;
      pass.is_last = takes_all || number == kNumPasses - 1 || (number == 0 && bin < kNumBins - 1);
      if (pass.is_last) {
        const int shift = number == 1 ? 22 : number == 2 ? 11 : 0;
        const uint32_t prefix = number < 2 ? 0 : pass.prefix << 11;
        const uint32_t lowest = (prefix | static_cast<uint32_t>(bin)) << shift;
        state->cut = lowest;
        state->last = takes_all ? lowest - 1 : lowest;
        state->num_ties = takes_all ? 0 : pass.wanted;
      } else {
        Pass& next = state->passes[number + 1];
        next.is_needed = 1;
        next.prefix = number == 0 ? 0 : (number == 1 ? 0 : pass.prefix << 11) | bin;
        next.wanted = number == 0 ? wanted : pass.wanted;  // the radix selection begins anew
      }
    }
    above += size;
  }
}

template <class Scores>
__host__ __device__ uint32_t* cut_of(const Scores& scores) {
  if constexpr (Scores::kGuesses) return scores.cut;
  return nullptr;
}

// Before there was a selection: that all rows with a score are chosen.
__device__ uint32_t guess_of(const uint32_t* cut) { return *cut == 0 ? 1 : *cut; }

// All lanes of a warp call it. bits: of its rows.
__device__ void note_cut(const uint32_t* keys, uint32_t cut, CutBits* bits) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = 0; i < kRowsPerLoad; ++i) {
    const uint32_t above = __ballot_sync(kAllLanes, keys[i] > cut);
    const uint32_t at = __ballot_sync(kAllLanes, keys[i] == cut);
    if (lane == i) bits->above[i] = above;
    if (lane == i) bits->at[i] = at;
  }
}

// grid: one block per part. part_bins: (num_parts, kNumBins).
template <class Scores, int kPass>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    count_bins_kernel(Scores scores, Rows rows, State* state, uint32_t* part_bins,
                      CutBits* cut_bits, Count k) {
  uint32_t* const bins = bins_of_block().bins;
  unsigned& is_last_block = bins_of_block().is_last_block;
  Pass& pass = state->passes[kPass];
  if (kPass > 0 && pass.is_needed == 0) return;
  for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const uint32_t prefix = pass.prefix;
  const int64_t end = rows.end();
  constexpr bool kNotesCut = Scores::kGuesses && kPass == 0;
  const uint32_t guess = kNotesCut ? guess_of(cut_of(scores)) : 0;
  const auto count = [&](const uint32_t* keys, int64_t warp_row) {
    for (int i = 0; i < kRowsPerLoad; ++i) {
      const uint32_t bin = bin_of<kPass>(keys[i], prefix);
      if (bin < kNumBins) atomicAdd(&bins[bin], 1u);
    }
    if (kNotesCut) note_cut(keys, guess, cut_bits + rows.warp_of(warp_row));
  };
  const int in_warp = static_cast<int>(threadIdx.x % 32) * kRowsPerLoad;
  int64_t warp_row = rows.begin() + threadIdx.x * kRowsPerLoad - in_warp;  // of all lanes the same
  for (; warp_row + (kLoads - 1) * kTileRows + kWarpRows <= end; warp_row += kLoads * kTileRows) {
    uint32_t keys[kLoads][kRowsPerLoad];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      scores.load_keys(warp_row + in_warp + i * kTileRows, end, keys[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) count(keys[i], warp_row + i * kTileRows);
  }
  for (; warp_row < end; warp_row += kTileRows) {
    uint32_t keys[kRowsPerLoad];
    scores.load_keys(warp_row + in_warp, end, keys);
    count(keys, warp_row);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) {
    part_bins[static_cast<int64_t>(blockIdx.x) * kNumBins + bin] = bins[bin];
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

// How many of a part's rows lie above the open bin, and in it. grid: one block per part.
__global__ void __launch_bounds__(kThreads)
    tally_kernel(const State* state, const uint32_t* part_bins, Part* parts, int number) {
  const Pass& pass = state->passes[number];
  if (number > 0 && pass.is_needed == 0) return;
  const uint32_t* bins = part_bins + static_cast<int64_t>(blockIdx.x) * kNumBins;
  const bool has_rows = pass.wanted > 0;
  Count mine = 0;
  for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) {
    if (has_rows && bin > static_cast<int>(pass.open)) mine += bins[bin];
  }
  Count above;
  sum_before(mine, &above);
  if (threadIdx.x != 0) return;
  Part& part = parts[blockIdx.x];
  part.above = number < 2 ? above : part.above + above;
  part.equal = has_rows ? bins[pass.open] : 0;
  if (pass.is_last != 0 && state->num_ties == 0) {  // the open bin is taken whole
    part.above += part.equal;
    part.equal = 0;
  }
}

// Where each part's rows go. grid: one block. cut: null, or what was guessed, for the next guess.
__global__ void __launch_bounds__(kThreads)
    place_kernel(State* state, Part* parts, int num_parts, uint32_t* cut) {
  const int begin = static_cast<int>(threadIdx.x) * kPartsPerThread;
  const int end = begin + kPartsPerThread < num_parts ? begin + kPartsPerThread : num_parts;
  Count mine = 0;
  for (int i = begin; i < end; ++i) mine += parts[i].equal;
  Count total;
  Count equal_before = sum_before(mine, &total);
  const Count num_ties = state->num_ties;
  mine = 0;
  for (int i = begin; i < end; ++i) {
    const Count left = equal_before < num_ties ? num_ties - equal_before : 0;
    parts[i].ties = left < parts[i].equal ? left : parts[i].equal;
    equal_before += parts[i].equal;
    mine += parts[i].above + parts[i].ties;
  }
  Count first = sum_before(mine, &total);
  for (int i = begin; i < end; ++i) {
    parts[i].first = first;
    first += parts[i].above + parts[i].ties;
  }
  if (threadIdx.x != 0) return;
  state->num_rows = total;
  if (cut == nullptr || total == 0) return;
  state->is_guessed = guess_of(cut) == state->cut;
  *cut = state->cut;
}

// Of a thread's rows, bit i is row i: those above the threshold, and those that tie with it.
struct ThreadRows {
  uint32_t above;
  uint32_t ties;
};

__device__ ThreadRows rows_of_keys(const uint32_t* keys, uint32_t last) {
  ThreadRows found{0, 0};
  for (int i = 0; i < kRowsPerLoad; ++i) {
    if (keys[i] > last) found.above |= 1u << i;
    if (keys[i] == last && keys[i] != 0) found.ties |= 1u << i;
  }
  return found;
}

__device__ ThreadRows rows_of_bits(const CutBits& bits, const State& state) {
  const unsigned lane = threadIdx.x % 32;
  ThreadRows found{0, 0};
  for (int i = 0; i < kRowsPerLoad; ++i) {
    found.above |= (bits.above[i] >> lane & 1u) << i;
    found.ties |= (bits.at[i] >> lane & 1u) << i;
  }
  if (state.num_ties == 0) return {found.above | found.ties, 0};  // the open bin is taken whole
  return found;
}

// Writes a part's rows: those above the threshold and its first ties. grid: one block per part.
template <class Scores>
__global__ void __launch_bounds__(kThreads, 8)
    write_kernel(Scores scores, Rows rows, const State* state, const Part* parts,
                 const CutBits* cut_bits, int64_t first_row_id, int64_t* row_ids) {
  const Part part = parts[blockIdx.x];
  if (part.above + part.ties == 0) return;
  const uint32_t last = state->last;
  const bool is_guessed = Scores::kGuesses && state->is_guessed != 0;
  const int64_t end = rows.end();
  Count above_before = 0;
  Count ties_before = 0;
  for (int64_t tile = rows.begin(); tile < end; tile += kTileRows) {
    const int64_t row = tile + threadIdx.x * kRowsPerLoad;
    ThreadRows found{0, 0};
    if (is_guessed) {
      if (row < end) found = rows_of_bits(cut_bits[rows.warp_of(row)], *state);
    } else {
      uint32_t keys[kRowsPerLoad];
      scores.load_keys(row, end, keys);
      found = rows_of_keys(keys, last);
    }
    // Rows above in the low half, ties in the high one: both at once, at most kTileRows each.
    const uint32_t mine = __popc(found.above) | __popc(found.ties) << 16;
    uint32_t total;
    const uint32_t before = sum_before(mine, &total);
    Count above = above_before + (before & 0xffffu);
    Count ties = ties_before + (before >> 16);
    for (int i = 0; i < kRowsPerLoad; ++i) {
      const bool is_above = (found.above >> i & 1u) != 0;
      const bool is_tie = (found.ties >> i & 1u) != 0;
      if (is_above || (is_tie && ties < part.ties)) {
        const Count taken_ties = ties < part.ties ? ties : part.ties;
        row_ids[part.first + above + taken_ties] = first_row_id + row + i;
      }
      above += is_above;
      ties += is_tie;
    }
    above_before += total & 0xffffu;
    ties_before += total >> 16;
  }
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

template <class Scores>
DeviceRows::DeviceRows(const Scores& scores, int64_t num_rows, int64_t k, int64_t first_row_id,
                       cudaStream_t stream)
    : state_(sizeof(State), stream) {
  CPR_EXT_CUDA(cudaMemsetAsync(state_.as<void>(), 0, sizeof(State), stream));
  const int64_t most_rows = std::min(k, num_rows);
  if (most_rows > 0) choose(scores, num_rows, most_rows, first_row_id, stream);
  chosen_.record(stream);
}

template <class Scores>
void DeviceRows::choose(const Scores& scores, int64_t num_rows, int64_t most_rows,
                        int64_t first_row_id, cudaStream_t stream) {
  auto* const state = state_.as<State>();
  row_ids_ = StreamMemory(most_rows * static_cast<int64_t>(sizeof(int64_t)), stream);
  const int64_t all_rows = num_rows + scores.lead();
  const int64_t wanted_parts =
      std::min(kMostParts, (all_rows + kFewestRowsPerPart - 1) / kFewestRowsPerPart);
  const int64_t rows_per_part = round_up((all_rows + wanted_parts - 1) / wanted_parts, kTileRows);
  const int64_t num_parts = (all_rows + rows_per_part - 1) / rows_per_part;
  const StreamMemory part_bins(num_parts * kNumBins * static_cast<int64_t>(sizeof(uint32_t)),
                               stream);
  const StreamMemory parts(num_parts * static_cast<int64_t>(sizeof(Part)), stream);
  const Rows rows{num_rows, rows_per_part, scores.lead()};
  StreamMemory cut_bits;
  if (Scores::kGuesses) {
    cut_bits = StreamMemory(
        num_parts * rows_per_part / kWarpRows * static_cast<int64_t>(sizeof(CutBits)), stream);
  }
  constexpr decltype(&count_bins_kernel<Scores, 0>) kPasses[kNumPasses] = {
      count_bins_kernel<Scores, 0>, count_bins_kernel<Scores, 1>, count_bins_kernel<Scores, 2>,
      count_bins_kernel<Scores, 3>};
  for (int pass = 0; pass < kNumPasses; ++pass) {
    CPR_EXT_LAUNCH(kPasses[pass], num_parts, kThreads, stream, scores, rows, state,
                   part_bins.as<uint32_t>(), cut_bits.as<CutBits>(), static_cast<Count>(most_rows));
    CPR_EXT_LAUNCH(tally_kernel, num_parts, kThreads, stream, state, part_bins.as<uint32_t>(),
                   parts.as<Part>(), pass);
  }
  CPR_EXT_LAUNCH(place_kernel, 1, kThreads, stream, state, parts.as<Part>(),
                 static_cast<int>(num_parts), cut_of(scores));
  CPR_EXT_LAUNCH(write_kernel<Scores>, num_parts, kThreads, stream, scores, rows, state,
                 parts.as<Part>(), cut_bits.as<CutBits>(), first_row_id, row_ids_.as<int64_t>());
}

template DeviceRows::DeviceRows(const StoredScores&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const StoredCounts&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const SetBits&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const BitsInTurn&, int64_t, int64_t, int64_t, cudaStream_t);
template DeviceRows::DeviceRows(const RandomScores&, int64_t, int64_t, int64_t, cudaStream_t);

RowIdVector DeviceRows::read(int device) {
  HostLink& link = HostLink::of(device);
  Count num_rows = 0;
  link.download(&num_rows, &state_.as<State>()->num_rows, sizeof(num_rows), chosen_);
  RowIdVector row_ids(num_rows);
  link.download(row_ids.data(), row_ids_.as<int64_t>(),
                static_cast<int64_t>(num_rows * sizeof(int64_t)), chosen_);
  num_rows_ = static_cast<int64_t>(num_rows);
  return row_ids;
}

RowIdVector device_top_rows(int device, const uint32_t* scores, int64_t num_rows, int64_t k) {
  const DeviceGuard guard(device);
  return DeviceRows(StoredScores{scores}, num_rows, k, 0, stream_of(device)).read(device);
}

}  // namespace cpr_ext
