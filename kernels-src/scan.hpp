// One pass over memory: w = x + before, or x + u + before with momentum u; entries of at least a magnitude are
// collected, and w is written with zeros in their places.

#pragma once

#include "level.hpp"
#include "segments.hpp"

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

// u' = x + rate u. u is `before`, null where there is none, and u' goes to `after`: with zeros where entries were
// collected, if `masked`. Nesterov's momentum looks ahead: x + rate u' is offered instead of u'.
struct Momentum {
    const float* before;
    float* after;
    float rate;
    bool nesterov;
    bool masked;
};

// A tensor in its buffer: element i is at place `place` + i. `before` is null where nothing is owed.
struct Span {
    const float* x;
    const float* before;
    float* after;
    int64_t size;
    int32_t place;
    Momentum u;
};

// What w is: x; x + before; u' + before; x + rate u' + before.
enum class Sum { kAlone, kOwed, kMomentum, kNesterov };

constexpr bool has_momentum(Sum sum) { return sum == Sum::kMomentum || sum == Sum::kNesterov; }

inline Sum sum_of(const Span& span) {
    if (span.u.before) return span.u.nesterov ? Sum::kNesterov : Sum::kMomentum;
    return span.before ? Sum::kOwed : Sum::kAlone;
}

// What happens to w. Streamed goes around the caches, which pays where a buffer does not fit them.
enum class Write { kNothing, kCached, kStreamed };

GOSSAMER_INLINE float accelerated(const Span& span, int64_t i) { return span.x[i] + span.u.before[i] * span.u.rate; }

// u: accelerated(span, i) where there is momentum.
template <Sum kSum>
GOSSAMER_INLINE float wanted(const Span& span, int64_t i, float u) {
    if (kSum == Sum::kAlone) return span.x[i];
    if (kSum == Sum::kOwed) return span.x[i] + span.before[i];
    return (kSum == Sum::kMomentum ? u : span.x[i] + u * span.u.rate) + span.before[i];
}

template <Sum kSum>
GOSSAMER_INLINE float wanted(const Span& span, int64_t i) {
    return wanted<kSum>(span, i, has_momentum(kSum) ? accelerated(span, i) : 0.0f);
}

// An address that is only asked for: it may be past the end of what `from` points into.
GOSSAMER_INLINE const void* beyond(const float* from, int64_t i) {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + sizeof(float) * static_cast<size_t>(i));
}

constexpr int64_t kAhead = 1024;

// Asks for the cache lines of elements kAhead from here, which may be the next tensor's: a small one is over before the
// processor sees where its reads go.
template <Sum kSum>
GOSSAMER_INLINE void announce(const Span& span, int64_t i, int64_t count) {
    for (i += kAhead; count > 0; i += 16, count -= 16) {
        GOSSAMER_FETCH(beyond(span.x, i));
        if (kSum == Sum::kAlone) continue;
        GOSSAMER_FETCH(beyond(span.before, i));
        GOSSAMER_FETCH_TO_WRITE(beyond(span.after, i));
        if (!has_momentum(kSum)) continue;
        GOSSAMER_FETCH(beyond(span.u.before, i));
        GOSSAMER_FETCH_TO_WRITE(beyond(span.u.after, i));
    }
}

// Scans elements i to `end`, one by one; used for the ends that fill no vector.
template <Sum kSum, Write kWrite>
GOSSAMER_INLINE void scan_singly(const Span& span, int64_t i, int64_t end, uint32_t least, Found& found) {
    for (; i < end; ++i) {
        const float u = has_momentum(kSum) ? accelerated(span, i) : 0.0f, w = wanted<kSum>(span, i, u);
        const uint32_t magnitude = magnitude_of(w);
        const bool taken = magnitude >= least;
        found.highest = std::max(found.highest, magnitude);
        found.places[found.count] = span.place + static_cast<int32_t>(i);
        found.values[found.count] = w;
        found.count += taken;
        if (kWrite != Write::kNothing) span.after[i] = taken ? 0.0f : w;
        if (has_momentum(kSum)) span.u.after[i] = taken && span.u.masked ? 0.0f : u;
    }
}

// Each scan returns where it stopped: the end, or earlier where more than `limit` are collected.
template <Sum kSum, Write kWrite>
int64_t scan_portable(const Span& span, int64_t i, uint32_t least, Found& found) {
    constexpr int64_t kBlock = 32;
    for (; i + kBlock <= span.size && found.count <= found.limit; i += kBlock) {
        uint32_t highest = 0;
        float w[kBlock], u[kBlock];
        for (int64_t j = 0; j < kBlock; ++j) {
            u[j] = has_momentum(kSum) ? accelerated(span, i + j) : 0.0f;
            w[j] = wanted<kSum>(span, i + j, u[j]);
            highest = std::max(highest, magnitude_of(w[j]));
        }
        found.highest = std::max(found.highest, highest);
        if (highest >= least) {
            scan_singly<kSum, kWrite>(span, i, i + kBlock, least, found);
        } else if (kWrite != Write::kNothing) {
            std::memcpy(span.after + i, w, sizeof w);
            if (has_momentum(kSum)) std::memcpy(span.u.after + i, u, sizeof u);
        }
    }
    if (found.count > found.limit || i + kBlock <= span.size) return i;
    scan_singly<kSum, kWrite>(span, i, span.size, least, found);
    return span.size;
}

#if GOSSAMER_X86

// The AVX2 loop, 8 elements at a time: what stays in registers. Magnitudes and `below`, which is one less than the
// threshold, have no sign bit, so that signed comparison is right.
template <Sum kSum, Write kWrite>
struct Narrow {
    __m256i below, highest;

    // Adds and compares elements i to i + 7; those taken are in `taken`.
    __attribute__((target("avx2"), always_inline)) inline __m256 look(const Span& span, int64_t i, __m256& taken) {
        const __m256 x = _mm256_loadu_ps(span.x + i), rate = _mm256_set1_ps(span.u.rate);
        __m256 w = x, u;
        if (has_momentum(kSum)) u = w = _mm256_add_ps(x, _mm256_mul_ps(_mm256_loadu_ps(span.u.before + i), rate));
        if (kSum == Sum::kNesterov) w = _mm256_add_ps(x, _mm256_mul_ps(u, rate));
        if (kSum != Sum::kAlone) w = _mm256_add_ps(w, _mm256_loadu_ps(span.before + i));
        const __m256i bits = _mm256_and_si256(_mm256_castps_si256(w), _mm256_set1_epi32(0x7fffffff));
        highest = _mm256_max_epu32(highest, bits);
        taken = _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below));
        put(span.after + i, _mm256_andnot_ps(taken, w));
        if (has_momentum(kSum)) put(span.u.after + i, span.u.masked ? _mm256_andnot_ps(taken, u) : u);
        return w;
    }

    __attribute__((target("avx2"), always_inline)) inline void put(float* to, __m256 rest) {
        if (kWrite == Write::kStreamed) _mm256_stream_ps(to, rest);
        if (kWrite == Write::kCached) _mm256_storeu_ps(to, rest);
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

template <Sum kSum, Write kWrite>
__attribute__((target("avx2"))) int64_t scan_avx2(const Span& span, int64_t i, uint32_t least, Found& found) {
    // Streamed stores must be aligned.
    const int64_t lead = kWrite == Write::kStreamed ? -(reinterpret_cast<intptr_t>(span.after + i) / 4) & 7 : 0;
    const int64_t begin = std::min(i + lead, span.size);
    scan_singly<kSum, kWrite>(span, i, begin, least, found);
    Narrow<kSum, kWrite> narrow;
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
    scan_singly<kSum, kWrite>(span, i, span.size, least, found);
    return span.size;
}

// The AVX-512 loop, 16 elements at a time: what stays in registers.
template <Sum kSum, Write kWrite>
struct Wide {
    __m512i least, highest, places;
    int64_t count;

    // Adds and compares elements i to i + 15 where `live`; those taken are in `taken`.
    __attribute__((target("avx512f,popcnt"), always_inline)) inline __m512 look(
        const Span& span, int64_t i, __mmask16 live, __mmask16& taken) {
        const __m512 x = _mm512_maskz_loadu_ps(live, span.x + i), rate = _mm512_set1_ps(span.u.rate);
        __m512 w = x, u;
        if (has_momentum(kSum)) u = w = _mm512_add_ps(x, _mm512_mul_ps(_mm512_maskz_loadu_ps(live, span.u.before + i), rate));
        if (kSum == Sum::kNesterov) w = _mm512_add_ps(x, _mm512_mul_ps(u, rate));
        if (kSum != Sum::kAlone) w = _mm512_add_ps(w, _mm512_maskz_loadu_ps(live, span.before + i));
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0x7fffffff));
        highest = _mm512_mask_max_epu32(highest, live, highest, bits);
        taken = _mm512_mask_cmpge_epu32_mask(live, bits, least);
        put(span.after + i, live, _mm512_maskz_mov_ps(static_cast<__mmask16>(~taken), w));
        const __mmask16 stays = span.u.masked ? static_cast<__mmask16>(~taken) : 0xffff;
        if (has_momentum(kSum)) put(span.u.after + i, live, _mm512_maskz_mov_ps(stays, u));
        return w;
    }

    __attribute__((target("avx512f,popcnt"), always_inline)) inline void put(float* to, __mmask16 live, __m512 rest) {
        if (kWrite == Write::kStreamed && live == 0xffff) {
            _mm512_stream_ps(to, rest);
        } else if (kWrite != Write::kNothing) {
            _mm512_mask_storeu_ps(to, live, rest);
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

template <Sum kSum, Write kWrite>
__attribute__((target("avx512f,popcnt"))) int64_t scan_avx512(
    const Span& span, int64_t i, uint32_t least, Found& found) {
    constexpr __mmask16 kAll = 0xffff;
    Wide<kSum, kWrite> wide;
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
        if (kWrite == Write::kCached) announce<kSum>(span, i, 64);
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
    for (const uint32_t top : tops) found.highest = std::max(found.highest, top);
    return i;
}

#endif

template <Sum kSum, Write kWrite>
int64_t scan_best(const Span& span, int64_t i, uint32_t least, Found& found) {
#if GOSSAMER_X86
    switch (level()) {
        case Level::kAvx512:
            return scan_avx512<kSum, kWrite>(span, i, least, found);
        case Level::kAvx2:
            return scan_avx2<kSum, kWrite>(span, i, least, found);
        default:
            break;
    }
#endif
    return scan_portable<kSum, kWrite>(span, i, least, found);
}

template <Sum kSum>
int64_t scan_writing(const Span& span, Write write, int64_t i, uint32_t least, Found& found) {
    return write == Write::kStreamed ? scan_best<kSum, Write::kStreamed>(span, i, least, found)
                                     : scan_best<kSum, Write::kCached>(span, i, least, found);
}

// Momentum is always written.
inline int64_t scan(const Span& span, Write write, int64_t i, uint32_t least, Found& found) {
    switch (sum_of(span)) {
        case Sum::kMomentum:
            return scan_writing<Sum::kMomentum>(span, write, i, least, found);
        case Sum::kNesterov:
            return scan_writing<Sum::kNesterov>(span, write, i, least, found);
        case Sum::kOwed:
            return write == Write::kNothing ? scan_best<Sum::kOwed, Write::kNothing>(span, i, least, found)
                                            : scan_writing<Sum::kOwed>(span, write, i, least, found);
        default:
            return scan_best<Sum::kAlone, Write::kNothing>(span, i, least, found);
    }
}

}  // namespace gossamer
