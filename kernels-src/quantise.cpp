// Every entry in a few bits: src/gossamer/kernels/{quantise,onebit,twobit,ternary,levels}.py in C++, bit for bit.
//
// An encoder walks over memory once: a block is measured while it comes into the first cache, read again from there,
// and its codes and what is left of it are written. `before` and `after` may be one buffer, and are null together.

#include "bits.hpp"
#include "common.hpp"
#include "noise.hpp"
#include "spans.hpp"

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

GOSSAMER_INLINE int64_t written(const Output& after, bool all_finite) {
    after.finish();
    return encoded(all_finite);
}

// Rounding without a library's function, for |ratio| < 2^22, so that it is fast with every instruction set.
struct Nearest {
    GOSSAMER_INLINE int32_t operator()(float ratio, int64_t) const {
        constexpr float kNoFraction = 0x1.8p23f;  // numbers of this size have no digits behind the point
        return static_cast<int32_t>(bits_of(ratio + kNoFraction) - bits_of(kNoFraction));
    }
};

struct Stochastic {
    Noise noise;

    GOSSAMER_INLINE int32_t operator()(float ratio, int64_t place) const {
        const float raised = ratio + noise.at(place);
        const int32_t toward_zero = static_cast<int32_t>(raised);
        return toward_zero - (raised < static_cast<float>(toward_zero));
    }
};

template <bool Owed, typename Round>
GOSSAMER_INLINE int64_t int8_encode(Wanted<Owed> x, Output after, const Spans& spans, Round round, float* scales,
                                    int8_t* codes) {
    alignas(64) float left[kChunk];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> w = x.from(place);
        const uint32_t most = largest_magnitude(w, n);
        if (most >= kInfinity) return false;
        const float scale = float_of(most) / 127.0f;
        const float over = scale == 0.0f ? float_of(kInfinity) : scale;
        *scales++ = scale;
        every_chunk(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> part = w.from(at);
            int8_t* to = codes + place + at;
            GOSSAMER_APART
            for (int64_t i = 0; i < count; i++) {
                const float now = part[i];
                int32_t code = round(now / over, place + at + i);
                code = code < -127 ? -127 : code;
                code = code > 127 ? 127 : code;
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
            GOSSAMER_APART
            for (int64_t i = 0; i < count; i++) {
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

template <bool Owed>
GOSSAMER_INLINE int64_t twobit_encode(Wanted<Owed> x, Output after, const Spans& spans, const float* thresholds,
                                      uint8_t* bytes) {
    alignas(64) float left[kChunk];
    alignas(64) uint8_t codes[kChunk + kSlack];
    return written(after, spans.every_block([&](int64_t tensor, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> w = x.from(place);
        const float t = thresholds[tensor];
        uint32_t most = 0;
        GOSSAMER_APART
        for (int64_t i = 0; i < n; i++) {
            const float now = w[i];
            most = larger(most, magnitude_of(now));
            const uint32_t up = -static_cast<uint32_t>(now >= t);  // all bits, or none
            const uint32_t down = -static_cast<uint32_t>(now <= -t) & ~up;
            codes[i] = static_cast<uint8_t>((up & 3) | (down & 2));
            if constexpr (Owed) left[i] = now - float_of((up & bits_of(t)) | (down & bits_of(-t)));
        }
        if constexpr (Owed) after.put(place, left, n);
        pack<Pairs>(codes, n, bytes);
        bytes += ceil_div(n, Pairs::kPerByte);
        return most < kInfinity;
    }));
}

template <typename Packing, bool Left>
GOSSAMER_INLINE int64_t ternary_encode(const float* x, Output after, const Spans& spans, const float* scales,
                                       Noise noise, uint8_t* bytes) {
    alignas(64) uint8_t codes[kChunk + kSlack];
    alignas(64) float left[kChunk];
    return written(after, spans.every_block([&](int64_t tensor, int64_t place, int64_t n) INLINED {
        const float scale = scales[tensor];
        const int32_t alive = scale != 0.0f;
        uint32_t most = 0;
        for (int64_t i = 0; i < n; i++) {
            const float now = x[place + i];
            most = larger(most, magnitude_of(now));
            const int32_t sent = noise.at(place + i) * scale < __builtin_fabsf(now);
            codes[i] = static_cast<uint8_t>((sent & alive) << (now < 0.0f));
            if constexpr (Left) left[i] = now - (sent & alive ? now < 0.0f ? -scale : scale : 0.0f);
        }
        if constexpr (Left) after.put(place, left, n);
        pack<Packing>(codes, n, bytes);
        bytes += ceil_div(n, Packing::kPerByte);
        return most < kInfinity;
    }));
}

template <bool Owed>
GOSSAMER_INLINE int64_t levels_encode(Wanted<Owed> x, Output after, const Spans& spans, int32_t levels, Stream stream,
                                      Noise noise, float* norms, uint8_t* bytes) {
    alignas(64) float room[kLargestBlock / 2];
    alignas(64) float left[kChunk];
    alignas(64) uint16_t codes[kChunk + kSlack];
    alignas(64) uint8_t packed[2 * kChunk + kSlack];
    return written(after, spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const Wanted<Owed> block = x.from(place);
        const float squares = sum_by_halves([&](int64_t i) INLINED { return block[i] * block[i]; }, n, room);
        const float norm = __builtin_sqrtf(squares), unit = norm / static_cast<float>(levels);
        const float over = unit == 0.0f ? float_of(kInfinity) : unit;
        *norms++ = norm;
        if (!finite(squares)) return false;  // else a level might not fit into its bits
        every_chunk<kFetched>(n, [&](int64_t at, int64_t count) INLINED {
            const Wanted<Owed> w = block.from(at);
            w.from(n).fetch(count);
            GOSSAMER_APART
            for (int64_t i = 0; i < count; i++) {
                const float now = w[i];
                int32_t level = static_cast<int32_t>(__builtin_fabsf(now) / over + noise.at(place + at + i));
                level = level < levels ? level : levels;
                level = now < 0.0f ? -level : level;
                codes[i] = static_cast<uint16_t>(levels + level);
                if constexpr (Owed) left[i] = now - static_cast<float>(level) * unit;
            }
            if constexpr (Owed) after.put(place + at, left, count);
            stream.pack(codes, count, packed);
            std::memcpy(bytes, packed, static_cast<size_t>(stream.bytes(count)));
            bytes += stream.bytes(count);
        });
        return true;
    }));
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_int8_encode(const float* x, const float* before, float* after,
                                                             const int64_t* sizes, int64_t tensors, int64_t block,
                                                             const uint64_t* key, float* scales, int8_t* codes) {
    const Spans spans{sizes, tensors, block};
    const Output left{after, spans.total()};
    const Wanted<true> owed{x, before};
    const Wanted<false> plain{x, nullptr};
    if (before && key) return int8_encode(owed, left, spans, Stochastic{Noise(*key)}, scales, codes);
    if (before) return int8_encode(owed, left, spans, Nearest{}, scales, codes);
    if (key) return int8_encode(plain, left, spans, Stochastic{Noise(*key)}, scales, codes);
    return int8_encode(plain, left, spans, Nearest{}, scales, codes);
}

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_onebit_encode(const float* x, const float* before, float* after,
                                                               const int64_t* sizes, int64_t tensors, int64_t block,
                                                               float* scales, uint8_t* bytes) {
    const Spans spans{sizes, tensors, block};
    const Output left{after, spans.total()};
    if (before) return onebit_encode(Wanted<true>{x, before}, left, spans, scales, bytes);
    return onebit_encode(Wanted<false>{x, nullptr}, left, spans, scales, bytes);
}

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_twobit_encode(const float* x, const float* before, float* after,
                                                               const int64_t* sizes, int64_t tensors,
                                                               const float* thresholds, uint8_t* bytes) {
    const Spans spans{sizes, tensors, kChunk};
    const Output left{after, spans.total()};
    if (before) return twobit_encode(Wanted<true>{x, before}, left, spans, thresholds, bytes);
    return twobit_encode(Wanted<false>{x, nullptr}, left, spans, thresholds, bytes);
}

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_ternary_encode(const float* x, float* after, const int64_t* sizes,
                                                                int64_t tensors, const float* scales, uint64_t key,
                                                                int64_t per_byte, uint8_t* bytes) {
    const Spans spans{sizes, tensors, kChunk};
    const Output left{after, spans.total()};
    const Noise noise(key);
    if (per_byte == 5 && after) return ternary_encode<Trits, true>(x, left, spans, scales, noise, bytes);
    if (per_byte == 5) return ternary_encode<Trits, false>(x, left, spans, scales, noise, bytes);
    if (after) return ternary_encode<Pairs, true>(x, left, spans, scales, noise, bytes);
    return ternary_encode<Pairs, false>(x, left, spans, scales, noise, bytes);
}

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_magnitudes(const float* x, const int64_t* sizes, int64_t tensors,
                                                            float* magnitudes) {
    bool all = true;
    for (int64_t t = 0; t < tensors; x += sizes[t++]) {
        const uint32_t most = largest_magnitude(x, sizes[t]);
        magnitudes[t] = float_of(most);
        all &= most < kInfinity;
    }
    return encoded(all);
}

GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_levels_encode(const float* x, const float* before, float* after,
                                                               const int64_t* sizes, int64_t tensors, int64_t block,
                                                               int64_t levels, int64_t bits, uint64_t key, float* norms,
                                                               uint8_t* bytes) {
    const Spans spans{sizes, tensors, block};
    const Stream stream{static_cast<int>(bits)};
    const int32_t count = static_cast<int32_t>(levels);
    const Output left{after, spans.total()};
    if (before) return levels_encode(Wanted<true>{x, before}, left, spans, count, stream, Noise(key), norms, bytes);
    return levels_encode(Wanted<false>{x, nullptr}, left, spans, count, stream, Noise(key), norms, bytes);
}
