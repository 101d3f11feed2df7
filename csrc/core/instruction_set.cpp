#include "core/instruction_set.h"

#include <atomic>
#include <cstdlib>

#include "core/error.h"

namespace cpr_ext {

namespace {

constexpr InstructionSet kAll[] = {InstructionSet::kPortable, InstructionSet::kAvx2,
                                   InstructionSet::kAvx512};

bool is_available(InstructionSet set) {
  if (set == InstructionSet::kPortable) return true;
#if CPR_EXT_HAS_AVX512
  if (set == InstructionSet::kAvx2) return __builtin_cpu_supports("avx2");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// An unknown name in the environment is passed over: no import fails for a slower kernel.
InstructionSet choose() {
  const char* wanted = std::getenv("CPR_EXT_INSTRUCTION_SET");
  InstructionSet best = InstructionSet::kPortable;
  for (const InstructionSet set : kAll) {
    if (!is_available(set)) continue;
    if (wanted != nullptr && name_of(set) == wanted) return set;
    best = set;
  }
  return best;
}

std::atomic<InstructionSet>& in_use() {
  static std::atomic<InstructionSet> set{choose()};
  return set;
}

}  // namespace

std::string name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
    default:
      return "portable";
  }
}

InstructionSet instruction_set() noexcept { return in_use().load(std::memory_order_relaxed); }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet set : kAll) {
    if (is_available(set)) names.push_back(name_of(set));
  }
  return names;
}

void use_instruction_set(const std::string& name) {
  std::string allowed;
  for (const InstructionSet set : kAll) {
    if (!is_available(set)) continue;
    if (name_of(set) == name) {
      in_use().store(set, std::memory_order_relaxed);
      return;
    }
    allowed += (allowed.empty() ? "" : ", ") + name_of(set);
  }
  throw UsageError("instruction set '" + name + "'; this CPU has: " + allowed);
}

}  // namespace cpr_ext
