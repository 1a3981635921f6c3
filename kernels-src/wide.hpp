// Decoders with AVX-512: the sum of 64 entries stays in registers while all payloads are added to it.

#pragma once

#include "bits.hpp"
#include "common.hpp"
#include "level.hpp"
#include "segments.hpp"

#include <vector>

#if GOSSAMER_X86
#include <immintrin.h>
#define GOSSAMER_WIDE __attribute__((target("avx512f"), always_inline)) static inline
#define GOSSAMER_WIDE_LOOP __attribute__((target("avx512f")))
#endif

namespace gossamer {

inline bool wide_serves() { return level() == Level::kAvx512; }

#if GOSSAMER_X86

// A code of kBits bits. value: what a payload's scale of a block becomes; meant: what the 16 codes from the at-th of a
// chunk stand for.
struct WideInt8 {
    static constexpr int kBits = 8;

    GOSSAMER_WIDE __m512 value(float scale) { return _mm512_set1_ps(scale); }

    GOSSAMER_WIDE __m512 meant(const uint8_t* chunk, int64_t at, __m512 scale) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + at));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale);
    }
};

struct WideBits {
    static constexpr int kBits = 1;

    GOSSAMER_WIDE __m512 value(float scale) { return _mm512_set1_ps(scale); }

    GOSSAMER_WIDE __m512 meant(const uint8_t* chunk, int64_t at, __m512 scale) {
        const __m512i sign = _mm512_maskz_set1_epi32(load<uint16_t>(chunk + at / 8), INT32_MIN);
        return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(scale), sign));
    }
};

struct WidePairs {
    static constexpr int kBits = 2;

    GOSSAMER_WIDE __m512 value(float t) { return _mm512_setr4_ps(0.0f, 0.0f, -t, t); }

    GOSSAMER_WIDE __m512 meant(const uint8_t* chunk, int64_t at, __m512 table) {
        const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i codes = _mm512_srlv_epi32(_mm512_set1_epi32(load<int32_t>(chunk + at / 4)), shifts);
        return _mm512_permutexvar_ps(codes, table);  // the next code's bits do no harm: the table repeats itself
    }
};

// The sum of n entries, a multiple of kRound.
template <typename Code>
GOSSAMER_WIDE_LOOP void wide_sums(const std::vector<const uint8_t*>& chunks, const std::vector<float>& scales,
                                  int64_t n, float divisor, float* sum) {
    const __m512 by = _mm512_set1_ps(divisor);
    for (int64_t at = 0; at < n; at += kRound) {
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (size_t payload = 0; payload < chunks.size(); payload++) {
            const __m512 value = Code::value(scales[payload]);
            for (int k = 0; k < 4; k++) {
                sums[k] = _mm512_add_ps(sums[k], Code::meant(chunks[payload], at + 16 * k, value));
            }
        }
        for (int k = 0; k < 4; k++) {
            _mm512_storeu_ps(sum + at + 16 * k, divisor == 1.0f ? sums[k] : _mm512_div_ps(sums[k], by));
        }
    }
}

// The codes of the last entries of a tensor, with zeros behind them.
struct WideEnds {
    std::vector<uint8_t> bytes;
    std::vector<const uint8_t*> chunks;

    explicit WideEnds(int64_t payloads) : bytes(static_cast<size_t>(payloads * kRound)) {
        for (int64_t payload = 0; payload < payloads; payload++) chunks.push_back(&bytes[payload * kRound]);
    }

    void copy(const std::vector<const uint8_t*>& from, int64_t start, int64_t count) {
        for (size_t payload = 0; payload < from.size(); payload++) {
            std::memcpy(&bytes[payload * kRound], from[payload] + start, static_cast<size_t>(count));
        }
    }
};

template <typename Code>
int64_t wide_decode(const float* const* scales, const uint8_t* const* packed, int64_t payloads, const Spans& spans,
                    float divisor, float* out) {
    std::vector<const uint8_t*> chunks(packed, packed + payloads);
    for (const uint8_t*& chunk : chunks) chunk += spans.bytes_before(8, Code::kBits);
    std::vector<float> now(chunks.size());
    WideEnds ends(payloads);
    alignas(64) float sum[kChunk];
    const Output result{out, spans.total()};
    int64_t index = spans.part.index;
    spans.every_block([&](int64_t, int64_t place, int64_t n) {
        for (size_t payload = 0; payload < now.size(); payload++) now[payload] = scales[payload][index];
        index++;
        every_chunk(n, [&](int64_t at, int64_t count) {
            const int64_t whole = count - count % kRound, bytes = ceil_div(count * Code::kBits, 8);
            wide_sums<Code>(chunks, now, whole, divisor, sum);
            if (whole < count) {
                const int64_t start = whole * Code::kBits / 8;
                ends.copy(chunks, start, bytes - start);
                wide_sums<Code>(ends.chunks, now, kRound, divisor, sum + whole);
            }
            result.put(place + at, sum, count);
            for (const uint8_t*& chunk : chunks) chunk += bytes;
        });
        return true;
    });
    result.finish();
    return kDone;
}

#else

struct WideInt8 {};
struct WideBits {};
struct WidePairs {};

template <typename Code>
int64_t wide_decode(const float* const*, const uint8_t* const*, int64_t, const Spans&, float, float*) {
    return kMalformed;  // never: wide_serves() is false
}

#endif

}  // namespace gossamer
