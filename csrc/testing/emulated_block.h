// The threads of one block as fibers.
#pragma once

#include <cstdint>
#include <functional>
#include <random>

namespace emulated_cuda {

// Runs `thread` once for each thread of the block blockIdx; without `random` in their order. False
// if the block cannot end, since threads wait for others that will not come.
bool run_block(const std::function<void()>& thread, std::mt19937_64* random);

// Shared memory of all kernels together: what is garbage when a block begins.
int64_t shared_bytes();

}  // namespace emulated_cuda
