// Which instructions the hand-written loops may use.

#pragma once

#include "common.hpp"

#if GOSSAMER_X86
#include <immintrin.h>
#endif

namespace gossamer {

enum class Level : int64_t { kPortable, kAvx2, kAvx512 };

// The best instruction set that the processor has, at most the one set by gossamer_limit_instructions.
Level level();

}  // namespace gossamer
