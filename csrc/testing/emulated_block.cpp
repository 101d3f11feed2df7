#undef _FORTIFY_SOURCE  // its longjmp() does not change stacks

#include <cuda_runtime.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <deque>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "testing/emulated_device.h"
#include "testing/emulated_machine.h"
#include "testing/emulated_memory.h"

// The section of all shared memory, as linkers name its ends.
extern "C" {
// Weak: kernels without shared memory have no such section.
extern unsigned char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulated_cuda {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kAtomicsPerChange = 4;  // on average
constexpr int kMostTurns = 64;             // of a warp that runs ahead of the others

// What runs on a stack of its own.
struct Context {
  ucontext_t begin;
  jmp_buf left;  // where it was left, once it has begun
  bool has_begun = false;
};

enum class ThreadState { kReady, kAtBarrier, kInExchange, kEnded };

struct Warp {
  unsigned mask = 0;
  unsigned arrived = 0;
  uint64_t given[kWarp];
  uint64_t all[kWarp];
};

struct Block {
  std::vector<ThreadState> threads;
  std::vector<Warp> warps;
  Context scheduler;
  int current = 0;
  int num_alive = 0;
  int num_at_barrier = 0;
  const std::function<void()>* body = nullptr;
  std::string misuse;
  std::mt19937_64* random = nullptr;
};

Block* block = nullptr;

// Leaves `from` until somebody changes to it.
__attribute__((noinline)) void change(Context& from, Context& to) {
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&from.begin, &to.begin);  // which AddressSanitizer knows
#else
  // swapcontext() makes a system call each time, and that is most of a kernel's time.
  from.has_begun = true;
  if (_setjmp(from.left) != 0) return;
  if (to.has_begun) _longjmp(to.left, 1);
  setcontext(&to.begin);
#endif
}

void run_threads();

void prepare(Context& context, void* stack) {
  getcontext(&context.begin);
  context.begin.uc_stack.ss_sp = stack;
  context.begin.uc_stack.ss_size = kStackBytes;
  makecontext(&context.begin, run_threads, 0);
  context.has_begun = false;
}

// One after another runs the threads of this number, of all blocks.
Context& context_of(int thread) {
  static std::deque<Context> contexts;  // they must not move
  while (static_cast<int>(contexts.size()) <= thread) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    Context& made = contexts.emplace_back();
    prepare(made, memory);
  }
  return contexts[thread];
}

void place(int thread) {
  block->current = thread;
  const unsigned x = static_cast<unsigned>(thread);
  threadIdx = {x % blockDim.x, x / blockDim.x, 0};
}

void release_barrier_if_complete() {
  if (block->num_at_barrier == 0 || block->num_at_barrier < block->num_alive) return;
  block->num_at_barrier = 0;
  for (ThreadState& state : block->threads) {
    if (state == ThreadState::kAtBarrier) state = ThreadState::kReady;
  }
}

void leave() { change(context_of(block->current), block->scheduler); }

void run_threads() {
  for (;;) {
    (*block->body)();
    block->threads[block->current] = ThreadState::kEnded;
    --block->num_alive;
    release_barrier_if_complete();
    leave();
  }
}

// Each thread of the warp runs until it waits for others. False if none could.
bool run_warp(int warp) {
  std::array<int, kWarp> lanes;
  std::iota(lanes.begin(), lanes.end(), 0);
  if (block->random != nullptr) std::shuffle(lanes.begin(), lanes.end(), *block->random);
  bool progressed = false;
  for (const int lane : lanes) {
    const int thread = warp * kWarp + lane;
    if (thread >= static_cast<int>(block->threads.size())) continue;
    if (block->threads[thread] != ThreadState::kReady || !block->misuse.empty()) continue;
    progressed = true;
    place(thread);
    change(block->scheduler, context_of(thread));
  }
  return progressed;
}

}  // namespace

int64_t shared_bytes() { return __stop_emulated_shared - __start_emulated_shared; }

uint64_t& wide_loads() {
  static uint64_t loads = 0;
  return loads;
}

bool run_block(const std::function<void()>& body, std::mt19937_64* random) {
  if (const int64_t bytes = shared_bytes(); bytes > 0) {
    memset(__start_emulated_shared, kGarbage, static_cast<size_t>(bytes));
  }
  const int num_threads = static_cast<int>(blockDim.x * blockDim.y);
  Block here;
  here.threads.resize(num_threads, ThreadState::kReady);
  here.warps.resize((num_threads + kWarp - 1) / kWarp);
  context_of(num_threads - 1);  // makes all of them
  here.num_alive = num_threads;
  here.body = &body;
  here.random = random;
  block = &here;
  std::vector<int> order(here.warps.size());
  std::iota(order.begin(), order.end(), 0);
  bool progressed = true;
  while (here.num_alive > 0 && progressed && here.misuse.empty()) {
    if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
    progressed = false;
    for (const int warp : order) {
      // As far as barriers let it: what it must not do before the others shows.
      for (int turn = 0; turn < kMostTurns && run_warp(warp); ++turn) progressed = true;
    }
  }
  block = nullptr;
  for (int i = 0; i < num_threads; ++i) {
    if (here.threads[i] == ThreadState::kEnded) continue;
    Context& stuck = context_of(i);
    prepare(stuck, stuck.begin.uc_stack.ss_sp);
  }
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
  block->threads[block->current] = ThreadState::kAtBarrier;
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
    for (int i = 0; i < kWarp && first + i < static_cast<int>(block->threads.size()); ++i) {
      ThreadState& state = block->threads[first + i];
      if (state == ThreadState::kInExchange) state = ThreadState::kReady;
    }
  } else {
    block->threads[block->current] = ThreadState::kInExchange;
    leave();
  }
  return warp.all;
}

}  // namespace emulated_cuda
