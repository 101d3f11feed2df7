// A bounded random sample of rows in the memory of a device, as kernels see it; for *.cu only.
//
// A row is in the sample exactly if its bit is set. Whoever sets the bit finds the row a slot: a
// free one, or a random one whose row leaves. Slots change hands by exchange alone, and whoever
// gets a row out of one clears its bit, so that all agree when the kernel has ended, in whatever
// order its threads ran.
#pragma once

#include <cstdint>

#include "core/cuda/bits.h"
#include "tracking/sampler_options.h"

namespace cpr_ext {

using SlotCount = unsigned long long;
constexpr SlotCount kEmptySlot = ~SlotCount{0};

struct DeviceSample {
  SamplerOptions options;
  uint32_t* dirty;       // bits
  uint32_t* sampled;     // bits; a subset of dirty
  SlotCount* rows;       // (capacity), a row's slot; kEmptySlot: none
  uint32_t* free_slots;  // (num_free)
  SlotCount num_free;
  SlotCount num_stale;  // slots whose row was taken: free once release_slots() has passed
  SlotCount num_drawn;  // random numbers
  SlotCount num_observed;
  SlotCount num_before;  // lookups before those of the batch at hand
  uint64_t salt;         // of this many lookups

  __device__ void begin_batch(int64_t num_lookups) {
    num_before = num_observed;
    num_observed += static_cast<SlotCount>(num_lookups);
    salt = options.salt(num_observed);
  }

  __device__ bool is_due(int64_t position) const {
    const SlotCount number = num_before + static_cast<SlotCount>(position);
    const SlotCount period_number = number / static_cast<SlotCount>(options.period);
    const SlotCount place = number - period_number * static_cast<SlotCount>(options.period);
    return static_cast<int64_t>(place) ==
           options.place_in(period_number / SamplerOptions::kPeriodsPerRun);
  }

  __device__ void enter(int64_t row) {
    if (!set_bit(sampled, row)) return;
    const SlotCount gone = atomicExch(rows + find_slot(), static_cast<SlotCount>(row));
    if (gone != kEmptySlot) clear_bit(sampled, static_cast<int64_t>(gone));
  }

  // The row leaves; its slot is freed later. Whether it was in the sample.
  __device__ bool leave(int64_t row) {
    if (!is_bit_set(sampled, row)) return false;
    clear_bit(sampled, row);
    atomicAdd(&num_stale, SlotCount{1});
    return true;
  }

  // Frees a slot if its row has left. REQUIRES: no row enters meanwhile.
  __device__ void release(SlotCount slot) {
    const SlotCount row = rows[slot];
    if (row == kEmptySlot || is_bit_set(sampled, static_cast<int64_t>(row))) return;
    rows[slot] = kEmptySlot;
    free_slots[atomicAdd(&num_free, SlotCount{1})] = static_cast<uint32_t>(slot);
    atomicAdd(&num_stale, ~SlotCount{0});
  }

 private:
  __device__ SlotCount find_slot() {
    // Below zero while some find that none is left; they set it right.
    if (static_cast<long long>(*static_cast<volatile SlotCount*>(&num_free)) > 0) {
      const auto left = static_cast<long long>(atomicAdd(&num_free, ~SlotCount{0}));
      if (left > 0) return free_slots[left - 1];
      atomicAdd(&num_free, SlotCount{1});
    }
    const SlotCount drawn = atomicAdd(&num_drawn, SlotCount{1});
    return random_below(static_cast<uint64_t>(options.capacity), options.seed, drawn);
  }
};

}  // namespace cpr_ext
