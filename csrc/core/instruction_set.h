// Which vector instructions kernels use: chosen once, at run time, so that one build runs on every
// x86-64 and on other CPUs. A kernel has a portable form, which is its specification, and may have
// others that give the same results.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#define CPR_EXT_HAS_AVX512 1
// On a function that may use AVX2; called only where instruction_set() says so.
#define CPR_EXT_AVX2 __attribute__((target("avx2")))
// On a function that may use AVX-512; called only where instruction_set() says so.
#define CPR_EXT_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define CPR_EXT_HAS_AVX512 0
#define CPR_EXT_AVX2
#define CPR_EXT_AVX512
#endif
// The body that several forms of a kernel share, each compiled for its own instructions.
#define CPR_EXT_KERNEL_BODY inline __attribute__((always_inline))
// On a lambda in one, which does not inherit that.
#define CPR_EXT_KERNEL_LAMBDA __attribute__((always_inline))

namespace cpr_ext {

enum class InstructionSet { kPortable, kAvx2, kAvx512 };

// The best that this CPU has; less if the environment variable CPR_EXT_INSTRUCTION_SET names
// another one, or use_instruction_set() was called.
InstructionSet instruction_set() noexcept;

// For tests and measurements: kernels use `name` from now on. UsageError if this CPU lacks it.
void use_instruction_set(const std::string& name);

// Names of those that this CPU has, the best one last: "portable", "avx2", "avx512".
std::vector<std::string> instruction_sets();

std::string name_of(InstructionSet set);

}  // namespace cpr_ext
