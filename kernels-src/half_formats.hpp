// The two formats of numbers of two bytes, and how to get there and back.

#pragma once

#include "common.hpp"
#include "segments.hpp"

namespace gossamer {

// The upper half of a float.
struct Bfloat16 {
    // The nearest number, the even one of two, for x that is not NaN.
    GOSSAMER_INLINE static uint16_t narrow(float x) {
        const uint32_t bits = bits_of(x);
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }

    GOSSAMER_INLINE static float widen(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }
};

// 5 bits of exponent, 10 behind the point. What is below 2^-14 has a fixed point: added to 1/2, whose last place is
// worth 2^-24, it is rounded as it should be, and no number that a processor may flush to zero is computed with.
struct Float16 {
    static constexpr uint32_t kHalf = 0x3f000000u;              // 1/2
    static constexpr uint32_t kRebias = (127u - 15u) << 23;     // between the exponents of both formats
    static constexpr uint32_t kNormal = kRebias + (1u << 23);   // 2^-14
    static constexpr uint32_t kBeyond = (127u + 16u) << 23;     // 2^16
    static constexpr uint32_t kQuiet = 1u << 22;                // what processors set in a NaN that they convert

    // As Bfloat16's; beyond the largest number of the format it is infinity.
    GOSSAMER_INLINE static uint16_t narrow(float x) {
        const uint32_t bits = bits_of(x), magnitude = bits & kMagnitude;
        const uint32_t fixed = bits_of(float_of(magnitude) + float_of(kHalf)) - kHalf;
        const uint32_t capped = magnitude < kBeyond ? magnitude : kBeyond;
        const uint32_t floating = (capped - kRebias + 0xfff + (capped >> 13 & 1)) >> 13;
        return static_cast<uint16_t>((magnitude < kNormal ? fixed : floating) | (bits >> 16 & 0x8000));
    }

    GOSSAMER_INLINE static float widen(uint16_t half) {
        const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
        const uint32_t fixed = bits_of(float_of(kHalf | magnitude) - float_of(kHalf));
        const uint32_t special = (magnitude << 13) | kInfinity | (magnitude > 0x7c00u ? kQuiet : 0);
        const uint32_t floating = magnitude < 0x7c00u ? (magnitude << 13) + kRebias : special;
        return float_of((magnitude < 0x400u ? fixed : floating) | sign);
    }
};

}  // namespace gossamer
