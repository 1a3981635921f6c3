// Candidates, divided into those that are kept and those that are dropped.

#pragma once

#include "level.hpp"

namespace gossamer {

// Entries of a chunk. A vector is stored whole.
struct Entries {
    static constexpr int64_t kRoom = 512;
    int32_t places[kRoom + 16];
    float values[kRoom + 16];
    int64_t count = 0;
};

// Keeps what is above `least` in magnitude, and the next `equal` entries that have it. n <= kRoom.
inline void partition_singly(const int32_t* places, const float* values, int64_t n, uint32_t least, int64_t& equal,
                             Entries& kept, Entries& dropped) {
    for (int64_t i = 0; i < n; ++i) {
        // Every entry goes to both ends, and one of them moves on: whether it is kept cannot be foretold.
        const uint32_t magnitude = magnitude_of(values[i]);
        const bool same = (magnitude == least) & (equal > 0), keep = same | (magnitude > least);
        equal -= same;
        kept.places[kept.count] = dropped.places[dropped.count] = places[i];
        kept.values[kept.count] = dropped.values[dropped.count] = values[i];
        kept.count += keep;
        dropped.count += !keep;
    }
}

#if GOSSAMER_X86

__attribute__((target("avx512f,popcnt"))) inline void partition_avx512(
    const int32_t* places, const float* values, int64_t n, uint32_t least, int64_t& equal, Entries& kept,
    Entries& dropped) {
    const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(least));
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 live = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
        const __m512i place = _mm512_maskz_loadu_epi32(live, places + i);
        const __m512i value = _mm512_maskz_loadu_epi32(live, values + i);
        const __m512i bits = _mm512_and_si512(value, _mm512_set1_epi32(0x7fffffff));
        unsigned keep = _mm512_mask_cmpgt_epu32_mask(live, bits, limit);
        unsigned same = _mm512_mask_cmpeq_epi32_mask(live, bits, limit);
        for (; same && equal; same &= same - 1, --equal) keep |= same & -same;
        const __mmask16 stay = static_cast<__mmask16>(keep), go = static_cast<__mmask16>(live & ~keep);
        _mm512_storeu_si512(kept.places + kept.count, _mm512_maskz_compress_epi32(stay, place));
        _mm512_storeu_si512(kept.values + kept.count, _mm512_maskz_compress_epi32(stay, value));
        _mm512_storeu_si512(dropped.places + dropped.count, _mm512_maskz_compress_epi32(go, place));
        _mm512_storeu_si512(dropped.values + dropped.count, _mm512_maskz_compress_epi32(go, value));
        kept.count += __builtin_popcount(stay);
        dropped.count += __builtin_popcount(go);
    }
}

#endif

inline void partition(const int32_t* places, const float* values, int64_t n, uint32_t least, int64_t& equal,
                      Entries& kept, Entries& dropped) {
#if GOSSAMER_X86
    if (level() == Level::kAvx512) return partition_avx512(places, values, n, least, equal, kept, dropped);
#endif
    partition_singly(places, values, n, least, equal, kept, dropped);
}

}  // namespace gossamer
