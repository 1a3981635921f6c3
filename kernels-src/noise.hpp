// Random numbers that depend on a key and a place only: src/gossamer/kernels/noise.py in C++.

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

struct Noise {
    uint32_t low, high;

    explicit Noise(uint64_t key) : low(static_cast<uint32_t>(key)), high(static_cast<uint32_t>(key >> 32)) {}

    GOSSAMER_INLINE float at(int64_t place) const {
        const uint32_t start = static_cast<uint32_t>(place) * 0x9E3779B9u + low;
        const uint32_t drawn = mix(start ^ high) >> 8;
        return static_cast<float>(static_cast<int32_t>(drawn)) * 0x1p-24f;
    }
};

}  // namespace gossamer
