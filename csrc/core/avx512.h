// The intrinsics of AVX-512, where there are any; only for sources that have a form of a kernel for
// it, behind CPR_EXT_HAS_AVX512.
#pragma once

#include "core/instruction_set.h"

#if CPR_EXT_HAS_AVX512
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header warns of its undefined vectors (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#endif
