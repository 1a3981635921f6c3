// What codes stand for, added up over payloads: src/gossamer/base/kernels/reference/{quantize,onebit,twobit,ternary,levels}.py in C++,
// bit for bit.
//
// A decoder keeps a chunk of the sum in the first cache while it walks over the payloads, and writes it once. Codes
// that no encoder writes are looked for before anything is written.

#include "bits.hpp"
#include "common.hpp"
#include "parts.hpp"
#include "segments.hpp"
#include "wide.hpp"

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

// A chunk of the sum, before the payload of that number is added; the first is added to zero, which costs less than to
// write zeros and read them again.
struct Sum {
    float* of;
    int64_t payload;

    GOSSAMER_INLINE void add(int64_t i, float x) const { of[i] = (payload ? of[i] : 0.0f) + x; }
};

// Over a power of two is times one over it, to the bit; and most groups are of such a size.
GOSSAMER_INLINE void divide(float* x, int64_t n, float divisor) {
    const float part = 1.0f / divisor;
    if (bits_of(divisor) & 0x7fffffu) {
        for (int64_t i = 0; i < n; i++) x[i] /= divisor;
    } else if (divisor != 1.0f) {
        for (int64_t i = 0; i < n; i++) x[i] *= part;
    }
}

// add(payload, block, place, count, sum) adds what a chunk of a payload stands for; `block` counts all blocks.
template <typename Add>
GOSSAMER_INLINE void averaged(const Spans& spans, int64_t payloads, float divisor, float* out, Add add) {
    alignas(64) float sum[kChunk];
    const Output result{out, spans.total()};
    int64_t index = spans.part.index;
    spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        every_chunk(n, [&](int64_t at, int64_t count) INLINED {
            for (int64_t i = 0; payloads == 0 && i < count; i++) sum[i] = 0.0f;
            for (int64_t payload = 0; payload < payloads; payload++) {
                add(payload, index, place + at, count, Sum{sum, payload});
            }
            divide(sum, count, divisor);
            result.put(place + at, sum, count);
        });
        index++;
        return true;
    });
    result.finish();
}

// Where the codes of the chunk that is being added begin: chunks come in order, `payloads` times each.
template <typename Packed>
struct Cursor {
    Packed packed;
    int64_t payloads;
    int64_t at;

    GOSSAMER_INLINE const uint8_t* next(int64_t payload, int64_t bytes) {
        const uint8_t* found = packed[payload] + at;
        if (payload == payloads - 1) at += bytes;
        return found;
    }
};

const uint8_t* const* bytes_of(const int8_t* const* codes) { return reinterpret_cast<const uint8_t* const*>(codes); }

// Each code's value, one to a byte, and up to kSlack bytes behind them.
template <typename Packing, uint8_t... Values>
GOSSAMER_INLINE void unpack(const uint8_t* bytes, int64_t n, uint8_t* values) {
    static constexpr Table<Packing, Values...> kTable;
    for (int64_t i = 0; i < ceil_div(n, Packing::kPerByte); i++) {
        store(values + i * Packing::kPerByte, kTable.of[bytes[i]]);
    }
}

// The same for a group of trits.
GOSSAMER_INLINE void count_group(const uint8_t* const* packed, int64_t payloads, int64_t at, uint8_t* values) {
    std::memset(values, 0, Trits::kGroup);
    for (int64_t payload = 0; payload < payloads; payload++) {
        Trits::unpack_group(packed[payload] + at, [&](int64_t k, int64_t i, uint16_t code) INLINED {
            values[k * Trits::kApart + i] += static_cast<uint8_t>(code + 1 - 3 * (code >> 1));
        });
    }
}

// Signs of a chunk, of all payloads together, plus how many payloads there were.
template <typename Packing, uint8_t... Values>
GOSSAMER_INLINE void count_signs(const uint8_t* const* packed, int64_t payloads, int64_t at, int64_t n,
                                 uint8_t* values) {
    static constexpr Table<Packing, Values...> kTable;
    if constexpr (Packing::kBase == Trits::kBase) {
        for (; n >= Trits::kGroup; n -= Trits::kGroup, at += Trits::kApart, values += Trits::kGroup) {
            count_group(packed, payloads, at, values);
        }
    }
    for (int64_t i = 0; i < ceil_div(n, Packing::kPerByte); i++) {
        uint64_t word = 0;
        for (int64_t payload = 0; payload < payloads; payload++) word += kTable.of[packed[payload][at + i]];
        store(values + i * Packing::kPerByte, word);
    }
}

template <typename Packing, uint8_t... Values>
GOSSAMER_INLINE int64_t ternary_decode(const uint8_t* const* packed, int64_t payloads, const float* scales,
                                       const Spans& spans, float divisor, float* out) {
    constexpr int64_t kTogether = 127;  // two for each payload fit into a byte
    alignas(64) uint8_t values[kChunk + kSlack] = {};
    alignas(64) int32_t sums[kChunk];
    alignas(64) float means[kChunk];
    const Output result{out, spans.total()};
    int64_t start = spans.bytes_before(Packing::kPerByte);
    spans.every_block([&](int64_t tensor, int64_t place, int64_t n) INLINED {
        const int64_t made = whole_rounds(0, n, kChunk);
        for (int64_t i = 0; payloads == 0 && i < made; i++) sums[i] = 0;
        for (int64_t first = 0; first < payloads; first += kTogether) {
            const int64_t count = smaller(kTogether, payloads - first);
            count_signs<Packing, Values...>(packed + first, count, start, n, values);
            const int32_t none = static_cast<int32_t>(count);  // what entries count that no payload holds
            for (int64_t i = 0; i < made; i++) sums[i] = (first ? sums[i] : 0) + values[i] - none;
        }
        const float scale = scales[tensor];
        for (int64_t i = 0; i < made; i++) means[i] = static_cast<float>(sums[i]) * scale;
        divide(means, made, divisor);
        result.put(place, means, n);
        start += ceil_div(n, Packing::kPerByte);
        return true;
    });
    result.finish();
    return kDone;
}

// Whether every code is at most `largest`, and what is left of the tensors' last bytes is zero.
GOSSAMER_INLINE bool are_levels(const uint8_t* from, const Spans& spans, Stream stream, int64_t largest) {
    from += spans.bytes_before(8, stream.bits);
    alignas(64) uint16_t codes[kChunk + kSlack];
    alignas(64) uint8_t packed[2 * kChunk + kSlack] = {};
    return spans.every_block([&](int64_t, int64_t, int64_t n) INLINED {
        const int64_t bytes = stream.bytes(n), used = n * stream.bits % 8;
        if (stream.bits == 8) {
            uint8_t highest = 0;
            for (int64_t i = 0; i < n; i++) highest = from[i] > highest ? from[i] : highest;
            from += n;
            return highest <= largest;
        }
        std::memcpy(packed, from, static_cast<size_t>(bytes));
        from += bytes;
        stream.unpack(packed, n, codes);
        uint16_t most = 0;
        for (int64_t i = 0; i < n; i++) most = codes[i] > most ? codes[i] : most;
        return most <= largest && (!used || packed[bytes - 1] >> used == 0);
    });
}

// For one part each: what is compiled for every instruction set, and run by any thread.

GOSSAMER_CLONES int64_t int8_part(const float* const* scales, const int8_t* const* codes, int64_t payloads, Spans spans,
                                  float divisor, float* out) {
    averaged(spans, payloads, divisor, out,
             [&](int64_t payload, int64_t index, int64_t place, int64_t n, Sum sum) INLINED {
                 const float scale = scales[payload][index];
                 const int8_t* from = codes[payload] + place;
                 GOSSAMER_APART
                 for (int64_t i = 0; i < n; i++) sum.add(i, static_cast<float>(from[i]) * scale);
             });
    return kDone;
}

GOSSAMER_CLONES int64_t onebit_part(const float* const* scales, const uint8_t* const* packed, int64_t payloads,
                                    Spans spans, float divisor, float* out) {
    alignas(64) uint8_t negative[kChunk + kSlack];
    Cursor<const uint8_t* const*> cursor{packed, payloads, spans.bytes_before(8)};
    averaged(spans, payloads, divisor, out,
             [&](int64_t payload, int64_t index, int64_t, int64_t n, Sum sum) INLINED {
                 const uint32_t scale = bits_of(scales[payload][index]);
                 unpack<Bits, 0, 1>(cursor.next(payload, ceil_div(n, 8)), n, negative);
                 GOSSAMER_APART
                 for (int64_t i = 0; i < n; i++) {
                     sum.add(i, float_of(scale ^ static_cast<uint32_t>(negative[i]) << 31));
                 }
             });
    return kDone;
}

GOSSAMER_CLONES int64_t twobit_part(const float* const* thresholds, const uint8_t* const* packed, int64_t payloads,
                                    Spans spans, float divisor, float* out) {
    alignas(64) uint8_t codes[kChunk + kSlack];
    Cursor<const uint8_t* const*> cursor{packed, payloads, spans.bytes_before(4)};
    averaged(spans, payloads, divisor, out,
             [&](int64_t payload, int64_t index, int64_t, int64_t n, Sum sum) INLINED {
                 const float t = thresholds[payload][index];
                 unpack<Pairs, 0, 1, 2, 3>(cursor.next(payload, ceil_div(n, 4)), n, codes);
                 GOSSAMER_APART
                 for (int64_t i = 0; i < n; i++) sum.add(i, codes[i] == 3 ? t : codes[i] == 2 ? -t : 0.0f);
             });
    return kDone;
}

GOSSAMER_CLONES int64_t ternary_part(const uint8_t* const* packed, int64_t payloads, const float* scales, Spans spans,
                                     int64_t per_byte, float divisor, float* out) {
    if (per_byte == 5) return ternary_decode<Trits, 1, 2, 0>(packed, payloads, scales, spans, divisor, out);
    return ternary_decode<Pairs, 1, 2, 0, 0>(packed, payloads, scales, spans, divisor, out);
}

GOSSAMER_CLONES int64_t levels_checked(const uint8_t* packed, Spans spans, Stream stream, int64_t largest) {
    return are_levels(packed, spans, stream, largest) ? kDone : kMalformed;
}

GOSSAMER_CLONES int64_t levels_part(const float* const* norms, const uint8_t* const* packed, int64_t payloads,
                                    Spans spans, int64_t levels, Stream stream, float divisor, float* out) {
    alignas(64) uint16_t codes[kChunk + kSlack];
    alignas(64) uint8_t near[2 * kChunk + kSlack] = {};
    Cursor<const uint8_t* const*> cursor{packed, payloads, spans.bytes_before(8, stream.bits)};
    averaged(spans, payloads, divisor, out,
             [&](int64_t payload, int64_t index, int64_t, int64_t n, Sum sum) INLINED {
                 const float unit = norms[payload][index] / static_cast<float>(levels);
                 const int32_t zero = static_cast<int32_t>(levels);
                 const int64_t bytes = stream.bytes(n);
                 if (stream.bits == 8) {
                     const uint8_t* from = cursor.next(payload, bytes);
                     GOSSAMER_APART
                     for (int64_t i = 0; i < n; i++) {
                         sum.add(i, static_cast<float>(static_cast<int32_t>(from[i]) - zero) * unit);
                     }
                     return;
                 }
                 std::memcpy(near, cursor.next(payload, bytes), static_cast<size_t>(bytes));
                 stream.unpack(near, n, codes);
                 GOSSAMER_APART
                 for (int64_t i = 0; i < n; i++) sum.add(i, static_cast<float>(codes[i] - zero) * unit);
             });
    return kDone;
}

GOSSAMER_CLONES bool clean_bits(const uint8_t* packed, const int64_t* sizes, int64_t tensors) {
    return well_packed<Bits>(packed, sizes, tensors);
}

GOSSAMER_CLONES bool clean_pairs(const uint8_t* packed, const int64_t* sizes, int64_t tensors, int64_t bytes) {
    return no_pair_is<1>(packed, bytes) && well_packed<Pairs>(packed, sizes, tensors);
}

GOSSAMER_CLONES bool clean_ternary(const uint8_t* packed, const int64_t* sizes, int64_t tensors, int64_t per_byte,
                                   int64_t bytes) {
    if (per_byte == 5) return well_packed<Trits>(packed, sizes, tensors);
    return no_pair_is<3>(packed, bytes) && well_packed<Pairs>(packed, sizes, tensors);
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

GOSSAMER_EXPORT int64_t gossamer_int8_decode(const float* const* scales, const int8_t* const* codes, int64_t payloads,
                                             const int64_t* sizes, int64_t tensors, int64_t block, float divisor,
                                             float* out) {
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        if (wide_serves()) return wide_decode<WideInt8>(scales, bytes_of(codes), payloads, part, divisor, out);
        return int8_part(scales, codes, payloads, part, divisor, out);
    });
}

GOSSAMER_EXPORT int64_t gossamer_onebit_decode(const float* const* scales, const uint8_t* const* packed,
                                               int64_t payloads, const int64_t* sizes, int64_t tensors, int64_t block,
                                               float divisor, float* out) {
    for (int64_t payload = 0; payload < payloads; payload++) {
        if (!clean_bits(packed[payload], sizes, tensors)) return kMalformed;
    }
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        if (wide_serves()) return wide_decode<WideBits>(scales, packed, payloads, part, divisor, out);
        return onebit_part(scales, packed, payloads, part, divisor, out);
    });
}

GOSSAMER_EXPORT int64_t gossamer_twobit_decode(const float* const* thresholds, const uint8_t* const* packed,
                                               int64_t payloads, const int64_t* sizes, int64_t tensors, int64_t block,
                                               int64_t bytes, float divisor, float* out) {
    for (int64_t payload = 0; payload < payloads; payload++) {
        if (!clean_pairs(packed[payload], sizes, tensors, bytes)) return kMalformed;
    }
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        if (wide_serves()) return wide_decode<WidePairs>(thresholds, packed, payloads, part, divisor, out);
        return twobit_part(thresholds, packed, payloads, part, divisor, out);
    });
}

GOSSAMER_EXPORT int64_t gossamer_ternary_decode(const uint8_t* const* packed, int64_t payloads, const float* scales,
                                                const int64_t* sizes, int64_t tensors, int64_t per_byte, int64_t bytes,
                                                float divisor, float* out) {
    for (int64_t payload = 0; payload < payloads; payload++) {
        if (!clean_ternary(packed[payload], sizes, tensors, per_byte, bytes)) return kMalformed;
    }
    return in_parts({sizes, tensors, kChunk}, [&](const Spans& part) {
        return ternary_part(packed, payloads, scales, part, per_byte, divisor, out);
    });
}

GOSSAMER_EXPORT int64_t gossamer_levels_decode(const float* const* norms, const uint8_t* const* packed,
                                               int64_t payloads, const int64_t* sizes, int64_t tensors, int64_t block,
                                               int64_t levels, int64_t bits, float divisor, float* out) {
    const Stream stream{static_cast<int>(bits)};
    for (int64_t payload = 0; payload < payloads; payload++) {
        const int64_t answer = in_parts({sizes, tensors, kChunk}, [&](const Spans& part) {
            return levels_checked(packed[payload], part, stream, 2 * levels);
        });
        if (answer != kDone) return answer;
    }
    return in_parts({sizes, tensors, block}, [&](const Spans& part) {
        return levels_part(norms, packed, payloads, part, levels, stream, divisor, out);
    });
}
