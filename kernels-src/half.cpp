// Numbers of two bytes: src/gossamer/base/kernels/reference/half.py in C++, bit for bit.
//
// Rounding and widening are arithmetic on bits that compilers turn into vectors, the same for every instruction set. A
// chunk is made in the first cache and written from there, around the caches where a buffer is too large for them.

#include "common.hpp"
#include "half_formats.hpp"
#include "parts.hpp"
#include "segments.hpp"

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

// As Output is for floats.
struct Halves {
    uint16_t* to;
    bool streamed;

    Halves(uint16_t* to, int64_t n) : to(to), streamed(GOSSAMER_X86 && n >= 2 * Output::kStreamedFrom) {}

    GOSSAMER_INLINE void put(int64_t place, const uint16_t* from, int64_t n) const {
        uint16_t* at = to + place;
        int64_t i = 0;
#if GOSSAMER_X86
        if (streamed) {
            for (; i < n && reinterpret_cast<uintptr_t>(at + i) % 64; i++) at[i] = from[i];
            for (; i + 8 <= n; i += 8) {
                const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
                _mm_stream_si128(reinterpret_cast<__m128i*>(at + i), eight);
            }
        }
#endif
        std::memcpy(at + i, from + i, sizeof(uint16_t) * static_cast<size_t>(n - i));
    }

    GOSSAMER_INLINE void finish() const {
#if GOSSAMER_X86
        if (streamed) _mm_sfence();
#endif
    }
};

template <typename Format>
GOSSAMER_INLINE int64_t encode(const float* x, const Spans& spans, float limit, Halves result) {
    alignas(64) uint16_t codes[kChunk];
    uint32_t most = 0;
    spans.every_block([&](int64_t, int64_t at, int64_t count) INLINED {
        for (int64_t i = 0; i < count; i++) {
            const float now = x[at + i];
            most = larger(most, magnitude_of(now));
            codes[i] = Format::narrow(now);
        }
        result.put(at, codes, count);
        return true;
    });
    result.finish();
    return encoded(most <= bits_of(limit));
}

template <typename Format>
GOSSAMER_INLINE int64_t decode(const uint16_t* const* halves, int64_t payloads, const Spans& spans, float divisor,
                               Output out) {
    alignas(64) float sum[kChunk];
    uint32_t most = 0;
    spans.every_block([&](int64_t, int64_t at, int64_t count) INLINED {
        for (int64_t payload = 0; payload < payloads; payload++) {
            const uint16_t* next = halves[payload] + at;
            for (int64_t i = 0; i < count; i += 32) GOSSAMER_FETCH(next + count + i);
            for (int64_t i = 0; i < count; i++) {
                const float term = Format::widen(next[i]);
                sum[i] = payload ? sum[i] + term : term;
            }
        }
        for (int64_t i = 0; divisor != 1.0f && i < count; i++) sum[i] /= divisor;
        most = larger(most, largest_magnitude(sum, count));
        out.put(at, sum, count);
        return true;
    });
    out.finish();
    return most < kInfinity ? kDone : kOverflow;
}

constexpr int64_t kBfloat16 = 8;  // bits of the exponent; float16 has 5

// For one part each: what is compiled for every instruction set, and run by any thread.

GOSSAMER_CLONES int64_t encode_part(const float* x, Spans spans, int64_t exponent_bits, float limit, uint16_t* halves) {
    const Halves result{halves, spans.total()};
    if (exponent_bits == kBfloat16) return encode<Bfloat16>(x, spans, limit, result);
    return encode<Float16>(x, spans, limit, result);
}

GOSSAMER_CLONES int64_t decode_part(const uint16_t* const* halves, int64_t payloads, Spans spans, int64_t exponent_bits,
                                    float divisor, float* out) {
    const Output result{out, spans.total()};
    if (exponent_bits == kBfloat16) return decode<Bfloat16>(halves, payloads, spans, divisor, result);
    return decode<Float16>(halves, payloads, spans, divisor, result);
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// kNotFinite where a number's magnitude is not at most `limit`; what was written is then good for nothing.
GOSSAMER_EXPORT int64_t gossamer_half_encode(const float* x, int64_t n, int64_t exponent_bits, float limit,
                                             uint16_t* halves) {
    return in_parts({&n, 1, kChunk},
                    [&](const Spans& part) { return encode_part(x, part, exponent_bits, limit, halves); });
}

// payloads: at least one. kOverflow where a result is not finite; all are written.
GOSSAMER_EXPORT int64_t gossamer_half_decode(const uint16_t* const* halves, int64_t payloads, int64_t n,
                                             int64_t exponent_bits, float divisor, float* out) {
    return in_parts({&n, 1, kChunk}, [&](const Spans& part) {
        return decode_part(halves, payloads, part, exponent_bits, divisor, out);
    });
}
