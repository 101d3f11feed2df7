#include "testing/emulated_block.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <string>
#include <vector>

namespace emulated_cuda {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kAtomicsPerChange = 4;  // on average

struct Fiber {
  ucontext_t context;
  enum { kReady, kAtBarrier, kInExchange, kEnded } state = kReady;
};

struct Warp {
  unsigned mask = 0;
  unsigned arrived = 0;
  uint64_t given[kWarp];
  uint64_t all[kWarp];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  int current = 0;
  int num_alive = 0;
  int num_at_barrier = 0;
  const std::function<void()>* body = nullptr;
  std::string misuse;
  std::mt19937_64* random = nullptr;
};

Block* block = nullptr;

std::byte* stack_of(int thread) {
  static std::vector<std::byte*> stacks;
  while (static_cast<int>(stacks.size()) <= thread) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stacks.push_back(static_cast<std::byte*>(memory));
  }
  return stacks[thread];
}

void place(int thread) {
  block->current = thread;
  const unsigned x = static_cast<unsigned>(thread);
  threadIdx = {x % blockDim.x, x / blockDim.x, 0};
}

void release_barrier_if_complete() {
  if (block->num_at_barrier == 0 || block->num_at_barrier < block->num_alive) return;
  block->num_at_barrier = 0;
  for (Fiber& fiber : block->fibers) {
    if (fiber.state == Fiber::kAtBarrier) fiber.state = Fiber::kReady;
  }
}

void run_fiber() {
  (*block->body)();
  block->fibers[block->current].state = Fiber::kEnded;
  --block->num_alive;
  release_barrier_if_complete();
}

void leave() {
  const int mine = block->current;
  swapcontext(&block->fibers[mine].context, &block->scheduler);
}

void prepare(int thread) {
  ucontext_t& context = block->fibers[thread].context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(thread);
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = &block->scheduler;
  makecontext(&context, run_fiber, 0);
}

}  // namespace

bool run_block(const std::function<void()>& body, std::mt19937_64* random) {
  const int num_threads = static_cast<int>(blockDim.x * blockDim.y);
  Block here;
  here.fibers.resize(num_threads);
  here.warps.resize((num_threads + kWarp - 1) / kWarp);
  here.num_alive = num_threads;
  here.body = &body;
  here.random = random;
  block = &here;
  for (int i = 0; i < num_threads; ++i) prepare(i);
  std::vector<int> order(num_threads);
  std::iota(order.begin(), order.end(), 0);
  bool progressed = true;
  while (here.num_alive > 0 && progressed && here.misuse.empty()) {
    if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
    progressed = false;
    for (const int thread : order) {
      if (here.fibers[thread].state != Fiber::kReady) continue;
      progressed = true;
      place(thread);
      swapcontext(&here.scheduler, &here.fibers[thread].context);
      if (!here.misuse.empty()) break;
    }
  }
  block = nullptr;
  return here.num_alive == 0;
}

void misuse(const char* what) {
  block->misuse = what;
  for (;;) leave();
}

int lane() { return block->current % kWarp; }

void reach_atomic() {
  if (block->random != nullptr && (*block->random)() % kAtomicsPerChange == 0) leave();
}

void barrier() {
  block->fibers[block->current].state = Fiber::kAtBarrier;
  ++block->num_at_barrier;
  release_barrier_if_complete();
  leave();
}

const uint64_t* exchange(unsigned mask, uint64_t value) {
  const int first = block->current / kWarp * kWarp;
  Warp& warp = block->warps[block->current / kWarp];
  if ((mask >> lane() & 1) == 0) misuse("a lane that its mask does not name");
  if (warp.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) misuse("two masks at once in a warp");
  warp.given[lane()] = value;
  warp.arrived |= 1u << lane();
  if (warp.arrived == mask) {
    std::copy(std::begin(warp.given), std::end(warp.given), warp.all);
    warp.arrived = 0;
    for (int i = 0; i < kWarp && first + i < static_cast<int>(block->fibers.size()); ++i) {
      Fiber& fiber = block->fibers[first + i];
      if (fiber.state == Fiber::kInExchange) fiber.state = Fiber::kReady;
    }
  } else {
    block->fibers[block->current].state = Fiber::kInExchange;
    leave();
  }
  return warp.all;
}

}  // namespace emulated_cuda
