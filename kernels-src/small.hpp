// The largest entries of a small tensor, in two passes over a near cache that hardly branch: of such tensors there are
// many, and whatever is guessed wrong costs as much as a hundred elements.

#pragma once

#include "partition.hpp"
#include "scan.hpp"

namespace gossamer {

constexpr int64_t kFew = 32;            // so many numbers are compared with one another in no time
constexpr int64_t kSmallTensor = 2048;  // elements, of which a look at all is cheaper than a sample

// Writes w and u'. The largest magnitude of every kFew-th element, from each of the first kFew on, goes to `tops`.
template <Sum kSum>
GOSSAMER_INLINE void sum_up_as(const Span& span, uint32_t* tops) {
    const auto look = [&](int64_t i, uint32_t top) __attribute__((always_inline)) {
        const float u = has_momentum(kSum) ? accelerated(span, i) : 0.0f, w = wanted<kSum>(span, i, u);
        if (kSum != Sum::kAlone) span.after[i] = w;
        if (has_momentum(kSum)) span.u.after[i] = u;
        return static_cast<uint32_t>(std::max(static_cast<int32_t>(top), static_cast<int32_t>(magnitude_of(w))));
    };
    uint32_t found[kFew] = {};
    int64_t i = 0;
    for (; i + kFew <= span.size; i += kFew) {
        announce<kSum>(span, i, kFew);
        GOSSAMER_APART
        for (int64_t j = 0; j < kFew; ++j) found[j] = look(i + j, found[j]);
    }
    std::memcpy(tops, found, sizeof found);
    for (int64_t j = 0; i < span.size; ++i, ++j) tops[j] = look(i, tops[j]);
}

GOSSAMER_CLONES static void sum_up(const Span& span, uint32_t* tops) {
    switch (sum_of(span)) {
        case Sum::kAlone:
            return sum_up_as<Sum::kAlone>(span, tops);
        case Sum::kOwed:
            return sum_up_as<Sum::kOwed>(span, tops);
        case Sum::kMomentum:
            return sum_up_as<Sum::kMomentum>(span, tops);
        default:
            return sum_up_as<Sum::kNesterov>(span, tops);
    }
}

// The rank-th largest of magnitudes, rank > 0: by counting for each how many of the first n are larger. Behind them, as
// far as kFew, there are zeros.
GOSSAMER_INLINE uint32_t nth_largest(const uint32_t* magnitudes, int64_t n, int64_t rank) {
    int32_t larger[kFew] = {}, least = INT32_MAX;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t one = static_cast<int32_t>(magnitudes[i]);
        for (int64_t j = 0; j < kFew; ++j) larger[j] += one > static_cast<int32_t>(magnitudes[j]);
    }
    for (int64_t j = 0; j < kFew; ++j) {
        least = std::min(least, larger[j] < rank ? static_cast<int32_t>(magnitudes[j]) : INT32_MAX);
    }
    return static_cast<uint32_t>(least);
}

GOSSAMER_CLONES static uint32_t nth_top(const uint32_t* tops, int64_t rank) { return nth_largest(tops, kFew, rank); }

// The count-th largest magnitude of at most kFew values; `equal` becomes how many of those that have it are among the
// `count` largest. kFew values are there to be read.
GOSSAMER_CLONES static uint32_t least_of_few(const float* values, int64_t n, int64_t count, int64_t& equal) {
    uint32_t magnitudes[kFew];
    for (int64_t i = 0; i < kFew; ++i) magnitudes[i] = i < n ? magnitude_of(values[i]) : 0;
    const uint32_t least = nth_largest(magnitudes, (n + 7) & -8, count);
    int32_t above = 0;
    for (int64_t i = 0; i < kFew; ++i) {
        above += static_cast<int32_t>(magnitudes[i]) > static_cast<int32_t>(least);
    }
    equal = count - above;
    return least;
}

// The `count` largest of at most kFew entries, the first ones among equals.
inline void keep_of_few(const Found& found, int64_t count, int32_t* places, float* values) {
    int64_t equal;
    const uint32_t least = least_of_few(found.values, found.count, count, equal);
    Entries keep, drop;
    partition(found.places, found.values, found.count, least, equal, keep, drop);
    std::memcpy(places, keep.places, static_cast<size_t>(count) * sizeof(int32_t));
    std::memcpy(values, keep.values, static_cast<size_t>(count) * sizeof(float));
}

#if GOSSAMER_X86

// w of a small tensor, looked at 16 elements at a time.
struct Rows {
    const float* w;
    int64_t size;
    __m512i least;

    // Which of elements i to i + 15 are taken.
    __attribute__((target("avx512f"), always_inline)) inline unsigned taken(int64_t i) const {
        const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(w + i), _mm512_set1_epi32(0x7fffffff));
        return _mm512_cmpge_epu32_mask(bits, least);
    }

    // The same where some of them may be past the end.
    __attribute__((target("avx512f"), always_inline)) inline __mmask16 taken_last(int64_t i) const {
        const __mmask16 live = static_cast<__mmask16>(i + 16 <= size ? 0xffff : i < size ? (1u << (size - i)) - 1 : 0);
        const __m512i bits = _mm512_and_si512(_mm512_maskz_loadu_epi32(live, w + i), _mm512_set1_epi32(0x7fffffff));
        return _mm512_mask_cmpge_epu32_mask(live, bits, least);
    }
};

// Rows of 32 elements that have entries to take are listed first, so that nothing needs to be foretold.
__attribute__((target("avx512f,popcnt"))) inline void collect_avx512(const Span& span, const float* w, uint32_t least,
                                                                     Found& found) {
    constexpr int64_t kRow = 32;
    const Rows rows{w, span.size, _mm512_set1_epi32(static_cast<int32_t>(least))};
    int32_t listed[kSmallTensor / kRow + 1];
    int64_t count = 0, i = 0;
    for (; i + kRow <= span.size; i += kRow) {
        if (span.before) announce<Sum::kOwed>(span, i, kRow);
        listed[count] = static_cast<int32_t>(i);
        count += (rows.taken(i) | rows.taken(i + 16)) != 0;
    }
    listed[count] = static_cast<int32_t>(i);
    count += i < span.size;
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t half = 0; half < 2 * count; ++half) {
        i = listed[half / 2] + half % 2 * 16;
        const __mmask16 taken = rows.taken_last(i);
        const __m512i places = _mm512_add_epi32(steps, _mm512_set1_epi32(span.place + static_cast<int32_t>(i)));
        const __m512 values = _mm512_maskz_loadu_ps(taken, w + i);
        _mm512_storeu_si512(found.places + found.count, _mm512_maskz_compress_epi32(taken, places));
        _mm512_storeu_ps(found.values + found.count, _mm512_maskz_compress_ps(taken, values));
        found.count += __builtin_popcount(taken);
    }
}

#endif

// Collects what is `least` or above, of what lies in `after` or, where nothing is owed, in x.
inline void collect(const Span& span, uint32_t least, Found& found) {
#if GOSSAMER_X86
    if (level() == Level::kAvx512) return collect_avx512(span, span.before ? span.after : span.x, least, found);
#endif
    const Span written{span.before ? span.after : span.x, nullptr, nullptr, span.size, span.place, {}};
    scan(written, Write::kNothing, 0, least, found);
}

}  // namespace gossamer
