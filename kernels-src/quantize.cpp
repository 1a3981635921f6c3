// Every entry in a few bits: src/gossamer/base/kernels/reference/{quantize,onebit,twobit,ternary,levels}.py in C++, bit for bit.
//
// An encoder walks over memory once: a block is measured while it comes into the first cache, read again from there,
// and its codes and what is left of it are written. `before` and `after` may be one buffer, and are null together.

#include "bits.hpp"
#include "common.hpp"
#include "counter_rng.hpp"
#include "parts.hpp"
#include "segments.hpp"

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

constexpr int64_t kDraws = kChunk + kRound + 2 * Noise::kGroup;  // room for a chunk's

GOSSAMER_INLINE int64_t written(const Output& after, bool all_finite) {
    after.finish();
    return encoded(all_finite);
}

// Rounding without a library's function, for |ratio| < 2^22, so that it is fast with every instruction set.
struct Nearest {
    GOSSAMER_INLINE int32_t operator()(float ratio) const {
        constexpr float kNoFraction = 0x1.8p23f;  // numbers of this size have no digits behind the point
        return static_cast<int32_t>(bits_of(ratio + kNoFraction) - bits_of(kNoFraction));
    }
};

struct ByNearest {
    struct Codes {
        float over;

        GOSSAMER_INLINE int32_t operator()(float w, int64_t) const {
            const int32_t code = Nearest{}(w / over);
            return code < -127 ? -127 : code > 127 ? 127 : code;
        }
    };

    GOSSAMER_INLINE Codes of(float scale, int64_t, int64_t, int32_t*) const {
        return {scale == 0.0f ? float_of(kInfinity) : scale};
    }
};

struct ByChance {
    struct Codes {
        Steps steps;
        const int32_t* draws;

        GOSSAMER_INLINE int32_t operator()(float w, int64_t i) const { return steps.rounded(w, draws[i]); }
    };

    Noise noise;

    GOSSAMER_INLINE Codes of(float scale, int64_t place, int64_t count, int32_t* room) const {
        const Steps steps(scale, 127);
        return {steps, noise.drawn(place, count, steps.bits, room)};
    }
};

template <bool Owed, typename Round>
GOSSAMER_INLINE int64_t int8_encode(Wanted<Owed> x, Output after, const Spans& spans, Round round, float* scales,
                                    int8_t* codes) {
    constexpr int64_t kAhead = 512;
    const int64_t total = spans.limit();
    alignas(64) float left[kChunk];
    alignas(64) int32_t room[kDraws];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> w = x.from(place);
        const uint32_t most = largest_magnitude(w, n);
        if (most >= kInfinity) return false;
        const float scale = float_of(most) / 127.0f;
        *scales++ = scale;
        every_chunk(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> part = w.from(at);
            part.from(kAhead).fetch(count);
            int8_t* to = codes + place + at;
            const int64_t made = whole_rounds(place + at, count, total);
            const auto code_of = round.of(scale, place + at, made, room);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = part[i];
                const int32_t code = code_of(now, i);
                to[i] = static_cast<int8_t>(code);
                if constexpr (Owed) left[i] = now - static_cast<float>(code) * scale;
            }
            if constexpr (Owed) after.put(place + at, left, count);
        });
        return true;
    }));
}

template <bool Owed>
GOSSAMER_INLINE int64_t onebit_encode(Wanted<Owed> x, Output after, const Spans& spans, float* scales, uint8_t* bytes) {
    const int64_t total = spans.limit();
    alignas(64) float room[kLargestBlock / 2];
    alignas(64) float left[kChunk];
    alignas(64) uint8_t negative[kChunk + kSlack];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        const float sum = sum_by_halves([&](int64_t i) INLINED { return __builtin_fabsf(block[i]); }, n, room);
        const float scale = sum / static_cast<float>(n);
        *scales++ = scale;
        every_chunk<kFetched>(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            w.from(n).fetch(count);
            const int64_t made = whole_rounds(place + at, count, total);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = w[i];
                negative[i] = now < 0.0f;
                if constexpr (Owed) left[i] = now - (now < 0.0f ? -scale : scale);
            }
            if constexpr (Owed) after.put(place + at, left, count);
            pack<Bits>(negative, count, bytes);
            bytes += ceil_div(count, 8);
        });
        return finite(sum);
    }));
}

// Thresholds that are known: codes are made in one walk.
struct Given {
    static constexpr bool kMeasures = false;

    template <typename Entries>
    GOSSAMER_INLINE bool find(Entries, int64_t, float*) const {
        return true;
    }
};

// `part` of a block's sum of squares over its sum of magnitudes. In doubles: squares leave a float's range.
struct Measured {
    static constexpr bool kMeasures = true;

    double part;
    double* room;  // kLargestBlock

    template <typename Entries>
    GOSSAMER_INLINE bool find(Entries w, int64_t n, float* threshold) const {
        double *magnitudes = room, *squares = room + kLargestBlock / 2;
        int64_t half = 1;
        while (2 * half < n) half *= 2;
        GOSSAMER_APART
        for (int64_t i = 0; i < n - half; i++) {  // the first step of both sums, so that w is added up once
            const double a = __builtin_fabsf(w[i]), b = __builtin_fabsf(w[i + half]);
            magnitudes[i] = a + b;
            squares[i] = a * a + b * b;
        }
        const int64_t alone = smaller(half, n);
        for (int64_t i = n - half; i < alone; i++) {
            const double a = __builtin_fabsf(w[i]);
            magnitudes[i] = a;
            squares[i] = a * a;
        }
        const double first = halved(magnitudes, half), second = halved(squares, half);
        *threshold = first == 0.0 ? 0.0f : static_cast<float>(part * second / first);
        return finite(*threshold);
    }
};

template <bool Owed, typename Threshold>
GOSSAMER_INLINE int64_t twobit_encode(Wanted<Owed> x, Output after, const Spans& spans, Threshold threshold,
                                      float* thresholds, uint8_t* bytes) {
    constexpr int64_t kAtATime = Threshold::kMeasures ? kFetched : kChunk;
    const int64_t total = spans.limit();
    alignas(64) float left[kChunk];
    alignas(64) uint8_t codes[kChunk + kSlack];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        if (!threshold.find(block, n, thresholds)) return false;
        const float t = *thresholds++;
        uint32_t most = 0;
        every_chunk<kAtATime>(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            if constexpr (Threshold::kMeasures) w.from(n).fetch(count);
            const int64_t made = whole_rounds(place + at, count, total);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = w[i];
                if constexpr (!Threshold::kMeasures) most = larger(most, magnitude_of(now));
                const uint32_t up = -static_cast<uint32_t>(now >= t);  // all bits, or none
                const uint32_t down = -static_cast<uint32_t>(now <= -t) & ~up;
                codes[i] = static_cast<uint8_t>((up & 3) | (down & 2));
                if constexpr (Owed) left[i] = now - float_of((up & bits_of(t)) | (down & bits_of(-t)));
            }
            if constexpr (Owed) after.put(place + at, left, count);
            pack<Pairs>(codes, count, bytes);
            bytes += ceil_div(count, Pairs::kPerByte);
        });
        return most < kInfinity;
    }));
}

template <typename Packing, bool Left>
GOSSAMER_INLINE int64_t ternary_encode(const float* x, Output after, const Spans& spans, const float* scales,
                                       Noise noise, uint8_t* bytes) {
    alignas(64) uint8_t codes[kChunk + kSlack];
    alignas(64) float left[kChunk];
    alignas(64) int32_t room[kDraws];
    const int64_t total = spans.limit();
    return written(after, spans.every_block([&](int64_t tensor, int64_t place, int64_t n) INLINED {
        const float scale = scales[tensor];
        const float over = scale == 0.0f ? float_of(kInfinity) : scale;  // zero sends nothing
        const int64_t made = whole_rounds(place, n, total);
        const int32_t* draws = noise.drawn(place, made, kNoiseBits, room);
        uint32_t most = 0;
        GOSSAMER_APART
        for (int64_t i = 0; i < made; i++) {
            const float now = x[place + i];
            most = larger(most, magnitude_of(now));
            const int32_t sent = static_cast<float>(draws[i]) * 0x1p-24f * over < __builtin_fabsf(now);
            codes[i] = static_cast<uint8_t>(sent << (now < 0.0f));
            if constexpr (Left) left[i] = now - (sent ? now < 0.0f ? -scale : scale : 0.0f);
        }
        if constexpr (Left) after.put(place, left, n);
        pack<Packing>(codes, n, bytes);
        bytes += ceil_div(n, Packing::kPerByte);
        return most < kInfinity;
    }));
}

template <bool Owed, typename Packed>
GOSSAMER_INLINE int64_t levels_encode(Wanted<Owed> x, Output after, const Spans& spans, int32_t levels, Packed packed,
                                      Noise noise, float* norms, uint8_t* bytes) {
    const int64_t total = spans.limit();
    alignas(64) float room[kLargestBlock / 2];
    alignas(64) float left[kChunk];
    alignas(64) int32_t drawn[kDraws];
    alignas(64) typename Packed::Code room_for_codes[kChunk + kSlack];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        const float squares = sum_by_halves([&](int64_t i) INLINED { return block[i] * block[i]; }, n, room);
        const float norm = __builtin_sqrtf(squares), unit = norm / static_cast<float>(levels);
        const Steps steps(unit, levels);
        *norms++ = norm;
        if (!finite(squares)) return false;  // else a level might not fit into its bits
        every_chunk<kFetched>(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            w.from(n).fetch(count);
            const int64_t made = whole_rounds(place + at, count, total);
            const int32_t* draws = noise.drawn(place + at, made, steps.bits, drawn);
            typename Packed::Code* codes = packed.codes(bytes, room_for_codes);
            GOSSAMER_APART
            for (int64_t i = 0; i < made; i++) {
                const float now = w[i];
                const int32_t level = steps.rounded(now, draws[i]);
                codes[i] = static_cast<typename Packed::Code>(levels + level);
                if constexpr (Owed) left[i] = now - static_cast<float>(level) * unit;
            }
            if constexpr (Owed) after.put(place + at, left, count);
            packed.put(codes, count, bytes);
            bytes += packed.bytes(count);
        });
        return true;
    }));
}

// For one part each: what is compiled for every instruction set, and run by any thread.

GOSSAMER_CLONES int64_t int8_part(const float* x, const float* before, float* after, Spans spans, const uint64_t* key,
                                  float* scales, int8_t* codes) {
    const Output left{after, spans.total()};
    const Wanted<true> owed{x, before};
    const Wanted<false> plain{x, nullptr};
    scales += spans.part.index;
    if (before && key) return int8_encode(owed, left, spans, ByChance{Noise(*key)}, scales, codes);
    if (before) return int8_encode(owed, left, spans, ByNearest{}, scales, codes);
    if (key) return int8_encode(plain, left, spans, ByChance{Noise(*key)}, scales, codes);
    return int8_encode(plain, left, spans, ByNearest{}, scales, codes);
}

GOSSAMER_CLONES int64_t onebit_part(const float* x, const float* before, float* after, Spans spans, float* scales,
                                    uint8_t* bytes) {
    const Output left{after, spans.total()};
    scales += spans.part.index;
    bytes += spans.bytes_before(8);
    if (before) return onebit_encode(Wanted<true>{x, before}, left, spans, scales, bytes);
    return onebit_encode(Wanted<false>{x, nullptr}, left, spans, scales, bytes);
}

GOSSAMER_CLONES int64_t twobit_part(const float* x, const float* before, float* after, Spans spans, double part,
                                    float* thresholds, uint8_t* bytes) {
    alignas(64) double room[kLargestBlock];
    const Output left{after, spans.total()};
    const Wanted<true> owed{x, before};
    const Wanted<false> plain{x, nullptr};
    const Measured measured{part, room};
    thresholds += spans.part.index;
    bytes += spans.bytes_before(4);
    if (before && part > 0.0) return twobit_encode(owed, left, spans, measured, thresholds, bytes);
    if (before) return twobit_encode(owed, left, spans, Given{}, thresholds, bytes);
    if (part > 0.0) return twobit_encode(plain, left, spans, measured, thresholds, bytes);
    return twobit_encode(plain, left, spans, Given{}, thresholds, bytes);
}

GOSSAMER_CLONES int64_t ternary_part(const float* x, float* after, Spans spans, const float* scales, uint64_t key,
                                     int64_t per_byte, uint8_t* bytes) {
    const Output left{after, spans.total()};
    const Noise noise(key);
    bytes += spans.bytes_before(per_byte);
    if (per_byte == 5 && after) return ternary_encode<Trits, true>(x, left, spans, scales, noise, bytes);
    if (per_byte == 5) return ternary_encode<Trits, false>(x, left, spans, scales, noise, bytes);
    if (after) return ternary_encode<Pairs, true>(x, left, spans, scales, noise, bytes);
    return ternary_encode<Pairs, false>(x, left, spans, scales, noise, bytes);
}

GOSSAMER_CLONES int64_t levels_part(const float* x, const float* before, float* after, Spans spans, int64_t levels,
                                    int64_t bits, uint64_t key, float* norms, uint8_t* bytes) {
    const Output left{after, spans.total()};
    const Wanted<true> owed{x, before};
    const Wanted<false> plain{x, nullptr};
    const Noise noise(key);
    const int32_t most = static_cast<int32_t>(levels);
    norms += spans.part.index;
    bytes += spans.bytes_before(8, bits);
    const auto encode = [&](auto packed) INLINED {
        if (before) return levels_encode(owed, left, spans, most, packed, noise, norms, bytes);
        return levels_encode(plain, left, spans, most, packed, noise, norms, bytes);
    };
    if (bits == 8) return encode(Even<uint8_t, 8>{});
    if (bits == 4) return encode(Even<uint16_t, 4>{});
    return encode(Stream{static_cast<int>(bits)});
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

GOSSAMER_EXPORT int64_t gossamer_int8_encode(const float* x, const float* before, float* after, const int64_t* sizes,
                                             int64_t tensors, int64_t block, const uint64_t* key, float* scales,
                                             int8_t* codes) {
    return in_parts({sizes, tensors, block},
                    [&](const Spans& part) { return int8_part(x, before, after, part, key, scales, codes); });
}

GOSSAMER_EXPORT int64_t gossamer_onebit_encode(const float* x, const float* before, float* after, const int64_t* sizes,
                                               int64_t tensors, int64_t block, float* scales, uint8_t* bytes) {
    return in_parts({sizes, tensors, block},
                    [&](const Spans& part) { return onebit_part(x, before, after, part, scales, bytes); });
}

// thresholds: one for each block, given; or where `part` is above zero, written.
GOSSAMER_EXPORT int64_t gossamer_twobit_encode(const float* x, const float* before, float* after, const int64_t* sizes,
                                               int64_t tensors, int64_t block, double part, float* thresholds,
                                               uint8_t* bytes) {
    return in_parts({sizes, tensors, block}, [&](const Spans& spans) {
        return twobit_part(x, before, after, spans, part, thresholds, bytes);
    });
}

GOSSAMER_EXPORT int64_t gossamer_ternary_encode(const float* x, float* after, const int64_t* sizes, int64_t tensors,
                                                const float* scales, uint64_t key, int64_t per_byte, uint8_t* bytes) {
    return in_parts({sizes, tensors, kChunk},
                    [&](const Spans& part) { return ternary_part(x, after, part, scales, key, per_byte, bytes); });
}

GOSSAMER_EXPORT int64_t gossamer_levels_encode(const float* x, const float* before, float* after, const int64_t* sizes,
                                               int64_t tensors, int64_t block, int64_t levels, int64_t bits,
                                               uint64_t key, float* norms, uint8_t* bytes) {
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        return levels_part(x, before, after, part, levels, bits, key, norms, bytes);
    });
}
