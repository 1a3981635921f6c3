// Codes that mean one of a few values, which a block's numbers say: src/gossamer/base/kernels/{float4,sign_magnitude}.py in
// C++, bit for bit.
//
// As in quantize.cpp and dequantize.cpp: an encoder walks over memory once, block by block; a decoder keeps a chunk of
// the sum in the first cache, and looks for codes that no encoder writes before it writes anything.

#include "bits.hpp"
#include "common.hpp"
#include "level.hpp"
#include "parts.hpp"
#include "segments.hpp"

#include <vector>

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

using Nibbles = Packing<uint16_t, 4>;

// kNumbers: how many float32 numbers travel for a block; meant: what a code stands for, given those.
struct Float4 {
    using Packed = Nibbles;
    static constexpr int kNumbers = 1;

    // 0 and the powers of two from 2^-6 to 1, with a sign. As bits: the last three of the exponent tell them apart.
    static GOSSAMER_INLINE uint32_t code(uint32_t unit) { return (unit >> 23 & 7) | (unit >> 28 & 8); }

    static GOSSAMER_INLINE float meant(uint32_t code, const float* numbers) {
        const uint32_t magnitude = code & 7 ? (code & 7) + 120 : 0;
        return float_of(magnitude << 23 | code >> 3 << 31) * numbers[0];
    }
};

struct SignMagnitude {
    using Packed = Pairs;
    static constexpr int kNumbers = 2;

    static GOSSAMER_INLINE float meant(uint32_t code, const float* numbers) {
        const uint32_t large = -(code & 1);
        const uint32_t magnitude = (large & bits_of(numbers[1])) | (~large & bits_of(numbers[0]));
        return float_of(magnitude ^ code >> 1 << 31);
    }
};

// Numbers of a block of scale s, in units of s, each rounded to what a code can stand for. To halve a number is to take
// one from its exponent: how often the midpoint of s and s / 2 has to be halved until w reaches it, the difference of
// their bits says.
struct Nearest {
    static constexpr int32_t kUnit = 127 << 23, kLeast = 121 << 23;  // bits of 1 and of 2^-6

    float lift;        // 1, or what makes numbers of a tiny block ordinary ones; multiplying by it rounds nothing
    int32_t midpoint;  // bits of 3 s / 4, or of the next number above where there is none
    int32_t lower;     // bits of the least number that is not rounded to zero

    explicit Nearest(float s) : lift(s < 0x1p-119f ? 0x1p64f : 1.0f), midpoint(kInfinity), lower(kInfinity) {
        if (s == 0.0f) return;
        const double exact = 0.75 * static_cast<double>(s * lift);
        const float near = static_cast<float>(exact);
        midpoint = static_cast<int32_t>(bits_of(near)) + (static_cast<double>(near) < exact);
        lower = static_cast<int32_t>(bits_of(s * lift * 0x1p-7f));
    }

    GOSSAMER_INLINE uint32_t operator()(float w) const {
        constexpr uint32_t kExponent = 0xff800000u;  // and the sign
        const int32_t magnitude = static_cast<int32_t>(magnitude_of(w * lift));
        const int32_t power = static_cast<int32_t>(kUnit + (static_cast<uint32_t>(magnitude - midpoint) & kExponent));
        const int32_t rounded = power > kLeast ? power : kLeast;
        const uint32_t sign = bits_of(w) & ~kMagnitude;
        return (static_cast<uint32_t>(rounded) | sign) & -static_cast<uint32_t>(magnitude >= lower);
    }
};

template <bool Owed>
GOSSAMER_INLINE int64_t float4_encode(Wanted<Owed> x, Output after, const Spans& spans, float* scales, uint8_t* bytes) {
    const int64_t total = spans.limit();
    alignas(64) float left[kChunk];
    alignas(64) uint8_t codes[kChunk + kSlack];
    const bool all = spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        const uint32_t most = largest_magnitude(block, n);
        if (most >= kInfinity) return false;
        const float scale = float_of(most);
        const Nearest nearest(scale);
        *scales++ = scale;
        every_chunk(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            const int64_t made = whole_rounds(place + at, count, total);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = w[i];
                const uint32_t unit = nearest(now);
                codes[i] = static_cast<uint8_t>(Float4::code(unit));
                if constexpr (Owed) left[i] = now - float_of(unit) * scale;
            }
            if constexpr (Owed) after.put(place + at, left, count);
            pack<Nibbles>(codes, count, bytes);
            bytes += ceil_div(count, Nibbles::kPerByte);
        });
        return true;
    });
    after.finish();
    return encoded(all);
}

// A block's numbers that travel: the mean magnitude of the entries up to the mean, and that of those above it.
struct TwoMeans {
    alignas(64) float small[kLargestBlock / 2];
    alignas(64) float large[kLargestBlock / 2];
    float mean;
    float numbers[2];

    // n entries; false where their sum is not finite.
    template <typename Entries>
    GOSSAMER_INLINE bool find(Entries w, int64_t n) {
        const float sum = sum_by_halves([&](int64_t i) INLINED { return __builtin_fabsf(w[i]); }, n, small);
        mean = sum / static_cast<float>(n);
        int64_t half = 1;
        while (2 * half < n) half *= 2;
        int32_t count = 0;
        for (int64_t i = 0; i < smaller(half, n); i++) {
            const float magnitude = __builtin_fabsf(w[i]);
            large[i] = magnitude > mean ? magnitude : 0.0f;
            small[i] = magnitude > mean ? 0.0f : magnitude;
            count += magnitude > mean;
        }
        for (int64_t i = half; i < n; i++) {
            const float magnitude = __builtin_fabsf(w[i]);
            large[i - half] += magnitude > mean ? magnitude : 0.0f;
            small[i - half] += magnitude > mean ? 0.0f : magnitude;
            count += magnitude > mean;
        }
        const int32_t others = static_cast<int32_t>(n) - count;
        numbers[0] = halved(small, half) / static_cast<float>(others ? others : 1);
        numbers[1] = halved(large, half) / static_cast<float>(count ? count : 1);
        return finite(sum);
    }
};

template <bool Owed>
GOSSAMER_INLINE int64_t sign_magnitude_encode(Wanted<Owed> x, Output after, const Spans& spans, float* means,
                                              uint8_t* bytes) {
    const int64_t total = spans.limit();
    alignas(64) float left[kChunk];
    alignas(64) uint8_t codes[kChunk + kSlack];
    TwoMeans two;
    const bool all = spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        if (!two.find(block, n)) return false;
        const float mean = two.mean, numbers[] = {two.numbers[0], two.numbers[1]};
        std::memcpy(means, numbers, sizeof numbers);
        means += 2;
        every_chunk<kFetched>(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            w.from(n).fetch(count);
            const int64_t made = whole_rounds(place + at, count, total);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = w[i];
                const uint32_t code = (__builtin_fabsf(now) > mean) | (now < 0.0f) << 1;
                codes[i] = static_cast<uint8_t>(code);
                if constexpr (Owed) left[i] = now - SignMagnitude::meant(code, numbers);
            }
            if constexpr (Owed) after.put(place + at, left, count);
            pack<Pairs>(codes, count, bytes);
            bytes += ceil_div(count, Pairs::kPerByte);
        });
        return true;
    });
    after.finish();
    return encoded(all);
}

// Whether the last byte of every tensor holds zeros where it holds no codes.
template <typename Packed>
GOSSAMER_INLINE bool clean(const uint8_t* bytes, const int64_t* sizes, int64_t tensors) {
    bool all = true;
    for (int64_t t = 0; t < tensors; t++) {
        bytes += ceil_div(sizes[t], Packed::kPerByte);
        const int64_t rest = sizes[t] % Packed::kPerByte;
        if (rest) all &= bytes[-1] >> (8 / Packed::kPerByte * rest) == 0;
    }
    return all;
}

// Whether no half of a byte is the code 8, a zero with a sign.
GOSSAMER_INLINE bool no_nibble_is_minus_zero(const uint8_t* bytes, int64_t n) {
    uint8_t found = 0;
    for (int64_t i = 0; i < n; i++) found |= ((bytes[i] & 0x0f) == 0x08) | ((bytes[i] & 0xf0) == 0x80);
    return !found;
}

// A chunk of all payloads: for each, where its codes begin, and its block's numbers.
struct Chunk {
    std::vector<const uint8_t*> codes;
    std::vector<const float*> numbers;
    std::vector<float> meant;  // room for what 16 codes of each stand for

    Chunk(const float* const* numbers, const uint8_t* const* packed, int64_t payloads)
        : codes(packed, packed + payloads), numbers(numbers, numbers + payloads), meant(16 * codes.size()) {}
};

// The sum of n entries of all payloads.
template <typename Code>
GOSSAMER_INLINE void add_up(const Chunk& chunk, int64_t n, float divisor, float* sum) {
    constexpr int kPerByte = Code::Packed::kPerByte, kWidth = 8 / kPerByte, kMask = (1 << kWidth) - 1;
    alignas(64) uint8_t codes[kChunk];
    for (int64_t i = 0; i < n; i++) sum[i] = 0.0f;
    for (size_t payload = 0; payload < chunk.codes.size(); payload++) {
        const uint8_t* from = chunk.codes[payload];
        for (int64_t i = 0; i < ceil_div(n, kPerByte); i++) {
            for (int k = 0; k < kPerByte; k++) codes[kPerByte * i + k] = from[i] >> (kWidth * k) & kMask;
        }
        float numbers[Code::kNumbers];
        std::memcpy(numbers, chunk.numbers[payload], sizeof numbers);
        for (int64_t i = 0; i < n; i++) sum[i] += Code::meant(codes[i], numbers);
    }
    for (int64_t i = 0; i < n; i++) sum[i] /= divisor;
}

#if GOSSAMER_X86

#define GOSSAMER_WIDE __attribute__((target("avx512f"), always_inline)) static inline

// Code k of the 16 in the word's low bits is the k-th index into a vector's 16 floats.
template <typename Packed>
struct Indices;

template <>
struct Indices<Nibbles> {
    GOSSAMER_WIDE __m512i of(const uint8_t* codes) {
        const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        const __m512i first = _mm512_set1_epi32(load<int32_t>(codes));
        return _mm512_srlv_epi32(_mm512_mask_set1_epi32(first, 0xff00, load<int32_t>(codes + 4)), shifts);
    }
};

template <>
struct Indices<Pairs> {
    GOSSAMER_WIDE __m512i of(const uint8_t* codes) {
        const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        return _mm512_srlv_epi32(_mm512_set1_epi32(load<int32_t>(codes)), shifts);
    }
};

// The same, and up to a whole round of 64 behind them.
template <typename Code>
__attribute__((target("avx512f"))) void add_up_wide(Chunk& chunk, int64_t n, float divisor, float* sum) {
    constexpr int64_t kPerByte = Code::Packed::kPerByte;
    for (size_t payload = 0; payload < chunk.codes.size(); payload++) {
        float meant[16], numbers[Code::kNumbers];
        std::memcpy(numbers, chunk.numbers[payload], sizeof numbers);
        // Again from the first where there are fewer codes than 16.
        for (uint32_t i = 0; i < 16; i++) meant[i] = Code::meant(i % Code::Packed::kBase, numbers);
        std::memcpy(&chunk.meant[16 * payload], meant, sizeof meant);
    }
    const __m512 by = _mm512_set1_ps(divisor);
    uint8_t end[kRound / kPerByte] = {};  // so that nothing behind the codes is read
    for (int64_t at = 0; at < n; at += kRound) {
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (size_t payload = 0; payload < chunk.codes.size(); payload++) {
            const __m512 meant = _mm512_loadu_ps(chunk.meant.data() + 16 * payload);
            const uint8_t* codes = chunk.codes[payload] + at / kPerByte;
            if (n - at < kRound) {
                std::memcpy(end, codes, static_cast<size_t>(ceil_div(n - at, kPerByte)));
                codes = end;
            }
            for (int64_t k = 0; k < 4; k++) {
                const __m512i indices = Indices<typename Code::Packed>::of(codes + 16 * k / kPerByte);
                sums[k] = _mm512_add_ps(sums[k], _mm512_permutexvar_ps(indices, meant));
            }
        }
        for (int64_t k = 0; k < 4; k++) {
            _mm512_store_ps(sum + at + 16 * k, divisor == 1.0f ? sums[k] : _mm512_div_ps(sums[k], by));
        }
    }
}

#endif

template <typename Code>
GOSSAMER_INLINE void added_up(Chunk& chunk, int64_t n, float divisor, float* sum) {
#if GOSSAMER_X86
    if (level() == Level::kAvx512) return add_up_wide<Code>(chunk, n, divisor, sum);
#endif
    add_up<Code>(chunk, n, divisor, sum);
}

template <typename Code>
GOSSAMER_INLINE int64_t decode(const float* const* numbers, const uint8_t* const* packed, int64_t payloads,
                               const Spans& spans, float divisor, float* out) {
    Chunk chunk(numbers, packed, payloads);
    for (const uint8_t*& codes : chunk.codes) codes += spans.bytes_before(Code::Packed::kPerByte);
    for (const float*& each : chunk.numbers) each += Code::kNumbers * spans.part.index;
    alignas(64) float sum[kChunk];
    const Output result{out, spans.total()};
    spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        every_chunk(n, [&](int64_t at, int64_t count) INLINED {
            added_up<Code>(chunk, count, divisor, sum);
            result.put(place + at, sum, count);
            for (const uint8_t*& codes : chunk.codes) codes += ceil_div(count, Code::Packed::kPerByte);
        });
        for (const float*& each : chunk.numbers) each += Code::kNumbers;
        return true;
    });
    result.finish();
    return kDone;
}

// For one part each: what is compiled for every instruction set, and run by any thread.

GOSSAMER_CLONES int64_t float4_part(const float* x, const float* before, float* after, Spans spans, float* scales,
                                    uint8_t* bytes) {
    const Output left{after, spans.total()};
    scales += spans.part.index;
    bytes += spans.bytes_before(Nibbles::kPerByte);
    if (before) return float4_encode(Wanted<true>{x, before}, left, spans, scales, bytes);
    return float4_encode(Wanted<false>{x, nullptr}, left, spans, scales, bytes);
}

GOSSAMER_CLONES int64_t sign_magnitude_part(const float* x, const float* before, float* after, Spans spans,
                                            float* means, uint8_t* bytes) {
    const Output left{after, spans.total()};
    means += 2 * spans.part.index;
    bytes += spans.bytes_before(Pairs::kPerByte);
    if (before) return sign_magnitude_encode(Wanted<true>{x, before}, left, spans, means, bytes);
    return sign_magnitude_encode(Wanted<false>{x, nullptr}, left, spans, means, bytes);
}

template <typename Code>
GOSSAMER_CLONES int64_t decode_part(const float* const* numbers, const uint8_t* const* packed, int64_t payloads,
                                    Spans spans, float divisor, float* out) {
    return decode<Code>(numbers, packed, payloads, spans, divisor, out);
}

GOSSAMER_CLONES bool clean_nibbles(const uint8_t* packed, const int64_t* sizes, int64_t tensors) {
    int64_t bytes = 0;
    for (int64_t t = 0; t < tensors; t++) bytes += ceil_div(sizes[t], Nibbles::kPerByte);
    return no_nibble_is_minus_zero(packed, bytes) && clean<Nibbles>(packed, sizes, tensors);
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// block: a multiple of 2.
GOSSAMER_EXPORT int64_t gossamer_float4_encode(const float* x, const float* before, float* after, const int64_t* sizes,
                                               int64_t tensors, int64_t block, float* scales, uint8_t* bytes) {
    return in_parts({sizes, tensors, block},
                    [&](const Spans& part) { return float4_part(x, before, after, part, scales, bytes); });
}

// block: a power of two from 8 to kLargestBlock.
GOSSAMER_EXPORT int64_t gossamer_sign_magnitude_encode(const float* x, const float* before, float* after,
                                                       const int64_t* sizes, int64_t tensors, int64_t block,
                                                       float* means, uint8_t* bytes) {
    return in_parts({sizes, tensors, block},
                    [&](const Spans& part) { return sign_magnitude_part(x, before, after, part, means, bytes); });
}

// block: a multiple of 2.
GOSSAMER_EXPORT int64_t gossamer_float4_decode(const float* const* scales, const uint8_t* const* packed,
                                               int64_t payloads, const int64_t* sizes, int64_t tensors, int64_t block,
                                               float divisor, float* out) {
    for (int64_t payload = 0; payload < payloads; payload++) {
        if (!clean_nibbles(packed[payload], sizes, tensors)) return kMalformed;
    }
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        return decode_part<Float4>(scales, packed, payloads, part, divisor, out);
    });
}

// block: a multiple of 4.
GOSSAMER_EXPORT int64_t gossamer_sign_magnitude_decode(const float* const* means, const uint8_t* const* packed,
                                                       int64_t payloads, const int64_t* sizes, int64_t tensors,
                                                       int64_t block, float divisor, float* out) {
    for (int64_t payload = 0; payload < payloads; payload++) {
        if (!clean<Pairs>(packed[payload], sizes, tensors)) return kMalformed;
    }
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        return decode_part<SignMagnitude>(means, packed, payloads, part, divisor, out);
    });
}
