// What the kernels share.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(_WIN32)
#define GOSSAMER_EXPORT extern "C" __declspec(dllexport)
#else
#define GOSSAMER_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GOSSAMER_INLINE inline __attribute__((always_inline))
#else
#define GOSSAMER_INLINE inline
#endif

// A function marked so is compiled for several instruction sets, and the first call finds the best that the processor
// has. Needs glibc (the linker chooses), and no sanitizer, which would run before it is ready.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GOSSAMER_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GOSSAMER_CLONES
#endif

// Intrinsics for x86, each function with its own __attribute__((target(...))), behind __builtin_cpu_supports.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GOSSAMER_X86 1
#else
#define GOSSAMER_X86 0
#endif

namespace gossamer {

// What a function answers when it has no count to give. The same numbers are in src/gossamer/base/kernels/library.py.
enum Answer : int64_t {
    kDone = 0,
    kNotFinite = -1,
    kMalformed = -2,
    kOverflow = -3,
    kNoMemory = -4,
    kMisfit = -5,  // sizes and counts that do not go together
};

constexpr uint32_t kMagnitude = 0x7fffffffu;  // all bits but the sign
constexpr uint32_t kInfinity = 0x7f800000u;   // the least magnitude that is not finite

GOSSAMER_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// As ordered as |x|, NaN above infinity.
GOSSAMER_INLINE uint32_t magnitude_of(float x) { return bits_of(x) & kMagnitude; }

}  // namespace gossamer
