// One pass over memory: w = x + before; entries of at least a magnitude are collected, and w is written with zeros in
// their places.

#pragma once

#include "level.hpp"

#include <algorithm>

namespace gossamer {

// Collected entries, places ascending. Both arrays have room for limit + kSlack.
struct Found {
    int32_t* places;
    float* values;
    int64_t limit;
    int64_t count = 0;
    uint32_t highest = 0;  // the largest magnitude seen, collected or not
};

constexpr int64_t kSlack = 80;  // vectors that cross the limit, and one that is stored whole

// A tensor in its buffer: element i is at place `place` + i. `before` is null where nothing is owed.
struct Span {
    const float* x;
    const float* before;
    float* after;
    int64_t size;
    int32_t place;
};

// What happens to w. Streamed goes around the caches, which pays where a buffer does not fit them.
enum class Write { kNothing, kCached, kStreamed };

template <bool kOwed>
GOSSAMER_INLINE float wanted(const Span& span, int64_t i) {
    return kOwed ? span.x[i] + span.before[i] : span.x[i];
}

// Scans elements i to `end`, one by one; used for the ends that fill no vector.
template <bool kOwed, Write kWrite>
GOSSAMER_INLINE void scan_singly(const Span& span, int64_t i, int64_t end, uint32_t least, Found& found) {
    for (; i < end; ++i) {
        const float w = wanted<kOwed>(span, i);
        const uint32_t magnitude = magnitude_of(w);
        const bool taken = magnitude >= least;
        found.highest = std::max(found.highest, magnitude);
        found.places[found.count] = span.place + static_cast<int32_t>(i);
        found.values[found.count] = w;
        found.count += taken;
        if (kWrite != Write::kNothing) span.after[i] = taken ? 0.0f : w;
    }
}

// Each scan returns where it stopped: the end, or earlier where more than `limit` are collected.
template <bool kOwed, Write kWrite>
int64_t scan_portable(const Span& span, int64_t i, uint32_t least, Found& found) {
    constexpr int64_t kBlock = 32;
    for (; i + kBlock <= span.size && found.count <= found.limit; i += kBlock) {
        uint32_t highest = 0;
        float w[kBlock];
        for (int64_t j = 0; j < kBlock; ++j) {
            w[j] = wanted<kOwed>(span, i + j);
            highest = std::max(highest, magnitude_of(w[j]));
        }
        found.highest = std::max(found.highest, highest);
        if (highest >= least) {
            scan_singly<kOwed, kWrite>(span, i, i + kBlock, least, found);
        } else if (kWrite != Write::kNothing) {
            std::memcpy(span.after + i, w, sizeof w);
        }
    }
    if (found.count > found.limit || i + kBlock <= span.size) return i;
    scan_singly<kOwed, kWrite>(span, i, span.size, least, found);
    return span.size;
}

#if GOSSAMER_X86

// The AVX2 loop, 8 elements at a time: what stays in registers. Magnitudes and `below`, which is one less than the
// threshold, have no sign bit, so that signed comparison is right.
template <bool kOwed, Write kWrite>
struct Narrow {
    __m256i below, highest;

    // Adds and compares elements i to i + 7; those taken are in `taken`.
    __attribute__((target("avx2"), always_inline)) inline __m256 look(const Span& span, int64_t i, __m256& taken) {
        __m256 w = _mm256_loadu_ps(span.x + i);
        if (kOwed) w = _mm256_add_ps(w, _mm256_loadu_ps(span.before + i));
        const __m256i bits = _mm256_and_si256(_mm256_castps_si256(w), _mm256_set1_epi32(0x7fffffff));
        highest = _mm256_max_epu32(highest, bits);
        taken = _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below));
        const __m256 rest = _mm256_andnot_ps(taken, w);
        if (kWrite == Write::kStreamed) _mm256_stream_ps(span.after + i, rest);
        if (kWrite == Write::kCached) _mm256_storeu_ps(span.after + i, rest);
        return w;
    }

    __attribute__((target("avx2"), always_inline)) inline void collect(
        const Span& span, int64_t i, __m256 w, __m256 taken, Found& found) {
        float values[8];
        _mm256_storeu_ps(values, w);
        for (int mask = _mm256_movemask_ps(taken); mask; mask &= mask - 1) {
            const int lane = __builtin_ctz(static_cast<unsigned>(mask));
            found.places[found.count] = span.place + static_cast<int32_t>(i) + lane;
            found.values[found.count++] = values[lane];
        }
    }
};

template <bool kOwed, Write kWrite>
__attribute__((target("avx2"))) int64_t scan_avx2(const Span& span, int64_t i, uint32_t least, Found& found) {
    // Streamed stores must be aligned.
    const int64_t lead = kWrite == Write::kStreamed ? -(reinterpret_cast<intptr_t>(span.after + i) / 4) & 7 : 0;
    const int64_t begin = std::min(i + lead, span.size);
    scan_singly<kOwed, kWrite>(span, i, begin, least, found);
    Narrow<kOwed, kWrite> narrow;
    narrow.below = _mm256_set1_epi32(static_cast<int32_t>(least) - 1);
    narrow.highest = _mm256_setzero_si256();
    for (i = begin; i + 16 <= span.size && found.count <= found.limit; i += 16) {
        __m256 t0, t1;
        const __m256 w0 = narrow.look(span, i, t0);
        const __m256 w1 = narrow.look(span, i + 8, t1);
        if (_mm256_movemask_ps(_mm256_or_ps(t0, t1))) {
            narrow.collect(span, i, w0, t0, found);
            narrow.collect(span, i + 8, w1, t1, found);
        }
    }
    if (kWrite == Write::kStreamed) _mm_sfence();
    uint32_t tops[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tops), narrow.highest);
    found.highest = std::max(found.highest, *std::max_element(tops, tops + 8));
    if (found.count > found.limit || i + 16 <= span.size) return i;
    scan_singly<kOwed, kWrite>(span, i, span.size, least, found);
    return span.size;
}

// The AVX-512 loop, 16 elements at a time: what stays in registers.
template <bool kOwed, Write kWrite>
struct Wide {
    __m512i least, highest, places;
    int64_t count;

    // Adds and compares elements i to i + 15 where `live`; those taken are in `taken`.
    __attribute__((target("avx512f,popcnt"), always_inline)) inline __m512 look(
        const Span& span, int64_t i, __mmask16 live, __mmask16& taken) {
        __m512 w = _mm512_maskz_loadu_ps(live, span.x + i);
        if (kOwed) w = _mm512_add_ps(w, _mm512_maskz_loadu_ps(live, span.before + i));
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0x7fffffff));
        highest = _mm512_mask_max_epu32(highest, live, highest, bits);
        taken = _mm512_mask_cmpge_epu32_mask(live, bits, least);
        const __m512 rest = _mm512_maskz_mov_ps(static_cast<__mmask16>(~taken), w);
        if (kWrite == Write::kStreamed && live == 0xffff) {
            _mm512_stream_ps(span.after + i, rest);
        } else if (kWrite != Write::kNothing) {
            _mm512_mask_storeu_ps(span.after + i, live, rest);
        }
        return w;
    }

    // Asks for the memory of elements i to i + 63, which may be the next tensor's: a small one is over before the
    // processor sees where its reads go.
    __attribute__((target("avx512f,popcnt"), always_inline)) inline void announce(const Span& span, int64_t i) {
        for (int64_t line = i; line < i + 64; line += 16) {
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(span.x) + 4 * line));
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(span.before) + 4 * line));
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(span.after) + 4 * line), 1);
        }
    }

    __attribute__((target("avx512f,popcnt"), always_inline)) inline void collect(
        int64_t i, __m512 w, __mmask16 taken, Found& found) {
        const __m512i at = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int32_t>(i)));
        _mm512_storeu_si512(found.places + count, _mm512_maskz_compress_epi32(taken, at));
        _mm512_storeu_ps(found.values + count, _mm512_maskz_compress_ps(taken, w));
        count += __builtin_popcount(taken);
    }
};

template <bool kOwed, Write kWrite>
__attribute__((target("avx512f,popcnt"))) int64_t scan_avx512(
    const Span& span, int64_t i, uint32_t least, Found& found) {
    constexpr __mmask16 kAll = 0xffff;
    Wide<kOwed, kWrite> wide;
    wide.least = _mm512_set1_epi32(static_cast<int32_t>(least));
    wide.highest = _mm512_setzero_si512();
    wide.places = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                   _mm512_set1_epi32(span.place));
    wide.count = found.count;
    const auto few = [&](int64_t step) __attribute__((target("avx512f,popcnt"), always_inline)) {
        __mmask16 taken;
        const __m512 w = wide.look(span, i, static_cast<__mmask16>((1u << step) - 1), taken);
        if (taken) wide.collect(i, w, taken, found);
        i += step;
    };
    // Streamed stores must be aligned: the first vector ends where `after` is.
    const int64_t lead = kWrite == Write::kStreamed ? -(reinterpret_cast<intptr_t>(span.after + i) / 4) & 15 : 0;
    if (lead && i < span.size) few(std::min(lead, span.size - i));
    for (; i + 64 <= span.size && wide.count <= found.limit; i += 64) {
        if (kWrite == Write::kCached) wide.announce(span, i + 1024);
        __mmask16 t0, t1, t2, t3;
        const __m512 w0 = wide.look(span, i, kAll, t0);
        const __m512 w1 = wide.look(span, i + 16, kAll, t1);
        const __m512 w2 = wide.look(span, i + 32, kAll, t2);
        const __m512 w3 = wide.look(span, i + 48, kAll, t3);
        if (t0 | t1 | t2 | t3) {
            wide.collect(i, w0, t0, found);
            wide.collect(i + 16, w1, t1, found);
            wide.collect(i + 32, w2, t2, found);
            wide.collect(i + 48, w3, t3, found);
        }
    }
    while (i < span.size && wide.count <= found.limit) few(std::min<int64_t>(16, span.size - i));
    if (kWrite == Write::kStreamed) _mm_sfence();
    found.count = wide.count;
    uint32_t tops[16];
    _mm512_storeu_si512(tops, wide.highest);
    found.highest = std::max(found.highest, *std::max_element(tops, tops + 16));
    return i;
}

#endif

template <bool kOwed, Write kWrite>
int64_t scan_best(const Span& span, int64_t i, uint32_t least, Found& found) {
#if GOSSAMER_X86
    switch (level()) {
        case Level::kAvx512:
            return scan_avx512<kOwed, kWrite>(span, i, least, found);
        case Level::kAvx2:
            return scan_avx2<kOwed, kWrite>(span, i, least, found);
        default:
            break;
    }
#endif
    return scan_portable<kOwed, kWrite>(span, i, least, found);
}

inline int64_t scan(const Span& span, Write write, int64_t i, uint32_t least, Found& found) {
    if (!span.before) return scan_best<false, Write::kNothing>(span, i, least, found);
    if (write == Write::kNothing) return scan_best<true, Write::kNothing>(span, i, least, found);
    if (write == Write::kCached) return scan_best<true, Write::kCached>(span, i, least, found);
    return scan_best<true, Write::kStreamed>(span, i, least, found);
}

}  // namespace gossamer
