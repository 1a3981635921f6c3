// Random numbers that depend on a key and a place only, and rounding with them: src/gossamer/base/kernels/reference/counter_rng.py in C++.

#pragma once

#include "common.hpp"

namespace gossamer {

GOSSAMER_INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

constexpr int kNoiseBits = 24;

// Draws for neighbouring places are made together and lie in the first cache until they are used: so any loop gets
// them at the price of a load, wherever its entries begin.
struct Noise {
    static constexpr int64_t kApart = 16;  // places that share a hash
    static constexpr int64_t kGroup = 2 * kApart;

    uint32_t low, high;

    explicit Noise(uint64_t key) : low(static_cast<uint32_t>(key)), high(static_cast<uint32_t>(key >> 32)) {}

    // The upper `bits` of what is drawn for each of `count` places from `place` on. room: count + 2 kGroup.
    GOSSAMER_INLINE const int32_t* drawn(int64_t place, int64_t count, int bits, int32_t* room) const {
        int32_t* to = room;
        for (int64_t group = place / kGroup; group * kGroup < place + count; group++, to += kGroup) {
            const uint32_t first = static_cast<uint32_t>(group * kApart);
            for (uint32_t i = 0; i < kApart; i++) {
                const uint32_t hash = mix(((first + i) * 0x9E3779B9u + low) ^ high);
                to[i] = static_cast<int32_t>(hash >> (32 - bits));
                to[i + kApart] = static_cast<int32_t>((hash << 16 | hash >> 16) >> (32 - bits));
            }
        }
        return room + place % kGroup;
    }
};

// floor(w / unit + u) between -most and most, 0 where the unit is; in fixed point, u being as many bits as there are
// behind the point. So no number has to be divided, and the floor is a shift.
struct Steps {
    float lift, per_unit, limit;
    int bits;

    GOSSAMER_INLINE Steps(float unit, int32_t most)
        : lift(unit < 0x1p-100f ? 0x1p100f : 1.0f),  // one over the unit stays finite
          per_unit(0.0f),
          bits(bits_behind(most)) {
        const float one = static_cast<float>(1 << bits);
        limit = static_cast<float>(most) * one;
        if (unit != 0.0f) per_unit = one / (unit * lift);
    }

    // As many as leave room for `most` and a carry below 2^31, at most kNoiseBits.
    static GOSSAMER_INLINE int bits_behind(int32_t most) {
        const int room = __builtin_clz(static_cast<uint32_t>(most)) - 1;
        return room < kNoiseBits ? room : kNoiseBits;
    }

    GOSSAMER_INLINE int32_t rounded(float w, int32_t draw) const {
        float fixed = w * lift * per_unit;
        fixed = fixed < limit ? fixed : limit;
        fixed = fixed > -limit ? fixed : -limit;
        return (static_cast<int32_t>(fixed) + draw) >> bits;
    }
};

}  // namespace gossamer
