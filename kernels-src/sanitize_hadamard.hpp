// Random input for the function of hadamard.cpp; part of sanitize.cpp.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common.hpp"

extern "C" int64_t gossamer_hadamard(const float*, const int64_t*, int64_t, int64_t, const float*, int64_t, float*);

namespace gossamer_sanitize {

inline void hadamard_must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_hadamard: %s\n", what);
    std::abort();
}

// Numbers go and come back, and keep their norm.
inline void hadamard(std::mt19937& random, const std::vector<int64_t>& sizes, int64_t block) {
    int64_t n = 0;
    for (const int64_t size : sizes) n += size;
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n)), there(x.size(), 7.0f), signs(static_cast<size_t>(block));
    for (float& each : x) each = normal(random);
    for (float& each : signs) each = random() % 2 ? 1.0f : -1.0f;
    const bool spoilt = n && random() % 8 == 0;
    if (spoilt) x[random() % x.size()] = random() % 2 ? NAN : -INFINITY;
    const auto turn = [&](const std::vector<float>& from, bool inverse, std::vector<float>& to) {
        return gossamer_hadamard(from.data(), sizes.data(), static_cast<int64_t>(sizes.size()), block, signs.data(),
                                 inverse, to.data());
    };
    const int64_t due = spoilt ? gossamer::kOverflow : gossamer::kDone;
    hadamard_must(turn(x, false, there) == due && turn(there, true, there) == due, "it answers something else");
    for (size_t i = 0; !spoilt && i < x.size(); i++) {
        hadamard_must(std::fabs(there[i] - x[i]) < 1e-4f, "numbers came back as others");
    }
}

}  // namespace gossamer_sanitize

inline void sanitize_hadamard() {
    std::mt19937 random(5);
    for (int64_t block = 1; block <= 16384; block *= 2) {
        for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
                 {}, {0}, {1}, {block}, {3 * block + 5, 0, 7}, {1023, 1024, 1025}, {2 * block - 1, 4097}}) {
            gossamer_sanitize::hadamard(random, sizes, block);
        }
    }
    gossamer_sanitize::hadamard(random, {(int64_t{1} << 19) + 77}, 64);  // large enough to pass the caches by
    const float one = 1.0f;
    const int64_t size = 1, bad[] = {0, -4, 3, 32768};
    float out = 0.0f;
    for (const int64_t block : bad) {
        gossamer_sanitize::hadamard_must(
            gossamer_hadamard(&one, &size, 1, block, &one, 0, &out) == gossamer::kMisfit, "a block was accepted");
    }
}
