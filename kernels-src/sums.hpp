// Sums of a few spans of numbers, in the order given, rounded once to the numbers' own format.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common.hpp"
#include "half_formats.hpp"

namespace gossamer {

// What a span's numbers are; the same numbers are in src/gossamer/comm/programs.py.
enum Format : int32_t { kBytes = 0, kFloat32 = 1, kFloat64 = 2, kBfloat16 = 3, kFloat16 = 4 };

GOSSAMER_INLINE int64_t itemsize_of(int32_t format) {
    return format == kFloat64 ? 8 : format == kFloat32 ? 4 : format == kBytes ? 1 : 2;
}

// How to compute with numbers: what they are added up in, and back.
template <typename T>
struct Plain {
    using Stored = T;
    using Wide = T;
    GOSSAMER_INLINE static T widen(T x) { return x; }
    GOSSAMER_INLINE static T narrow(T x) { return x; }
};

template <typename Half, uint16_t kNan>
struct Narrow {
    using Stored = uint16_t;
    using Wide = float;
    GOSSAMER_INLINE static float widen(uint16_t x) { return Half::widen(x); }
    GOSSAMER_INLINE static uint16_t narrow(float x) {
        return magnitude_of(x) > kInfinity ? kNan : Half::narrow(x);
    }
};

constexpr int64_t kSpan = 1024;  // numbers added up at once, so that what is between lies in the first cache

// out = (terms[0] + terms[1] + ...) / divisor; `out` may be one of the terms.
template <typename Number>
GOSSAMER_INLINE void add_up(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    using Stored = typename Number::Stored;
    using Wide = typename Number::Wide;
    alignas(64) Wide sum[kSpan];
    for (int64_t at = 0; at < n; at += kSpan) {
        const int64_t length = std::min(kSpan, n - at);
        const Stored* first = static_cast<const Stored*>(terms[0]) + at;
        for (int64_t i = 0; i < length; i++) sum[i] = Number::widen(first[i]);
        for (int64_t term = 1; term < count; term++) {
            const Stored* next = static_cast<const Stored*>(terms[term]) + at;
            for (int64_t i = 0; i < length; i++) sum[i] += Number::widen(next[i]);
        }
        const Wide whole = static_cast<Wide>(divisor);
        for (int64_t i = 0; divisor != 1.0 && i < length; i++) sum[i] /= whole;
        Stored* to = static_cast<Stored*>(out) + at;
        for (int64_t i = 0; i < length; i++) to[i] = Number::narrow(sum[i]);
    }
}

}  // namespace gossamer
