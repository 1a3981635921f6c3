// Random input for the functions of half.cpp; part of sanitize.cpp.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common.hpp"

extern "C" {
int64_t gossamer_half_encode(const float*, int64_t, int64_t, float, uint16_t*);
int64_t gossamer_half_decode(const uint16_t* const*, int64_t, int64_t, int64_t, float, float*);
}

namespace gossamer_sanitize {

inline void half_must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_halves: %s\n", what);
    std::abort();
}

// Numbers go and come back, three times over three, and are as far from what they were as the format allows.
inline void halves(std::mt19937& random, int64_t n, int64_t exponent_bits) {
    std::normal_distribution<float> normal;
    const float sizes[] = {1.0f, 1e-7f, 1e-41f, 1e4f}, size = sizes[random() % 4];
    std::vector<float> x(static_cast<size_t>(n)), out(x.size(), 7.0f);
    for (float& each : x) each = normal(random) * size;
    const bool spoilt = n && random() % 8 == 0;
    if (spoilt) x[random() % x.size()] = random() % 2 ? NAN : -INFINITY;
    std::vector<uint16_t> codes(x.size());
    const int64_t answer = gossamer_half_encode(x.data(), n, exponent_bits, FLT_MAX, codes.data());
    half_must(answer == (spoilt ? gossamer::kNotFinite : gossamer::kDone), "the encoder answers something else");
    const uint16_t* heard[] = {codes.data(), codes.data(), codes.data()};
    const int64_t decoded = gossamer_half_decode(heard, 3, n, exponent_bits, 3.0f, out.data());
    half_must(decoded == (spoilt ? gossamer::kOverflow : gossamer::kDone), "the decoder answers something else");
    const float relative = exponent_bits == 8 ? 0x1p-8f : 0x1p-11f, absolute = exponent_bits == 8 ? 1e-38f : 0x1p-25f;
    for (size_t i = 0; !spoilt && i < x.size(); i++) {
        half_must(std::fabs(out[i] - x[i]) <= 1.001f * (relative * std::fabs(x[i]) + absolute), "something was lost");
    }
}

}  // namespace gossamer_sanitize

inline void sanitize_halves(int64_t share) {
    std::mt19937 random(3);
    const int64_t sizes[] = {0, 1, 7, 8, 9, 31, 32, 33, 1279, 1280, 1281, 5000};
    for (int64_t round = 0; round < 20 / share; round++) {
        for (const int64_t n : sizes) {
            gossamer_sanitize::halves(random, n, 8);
            gossamer_sanitize::halves(random, n, 5);
        }
    }
    gossamer_sanitize::halves(random, (int64_t{1} << 20) + 77, 8);  // large enough to be written around the caches
    gossamer_sanitize::halves(random, (int64_t{1} << 20) + 77, 5);
}
