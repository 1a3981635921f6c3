// Several callers at once that let others share their work, beside one that works alone; part of sanitize.cpp, and what
// build/sanitize-threads runs under the thread sanitizer.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "common.hpp"

extern "C" {
int64_t gossamer_use_threads(int64_t);
int64_t gossamer_onebit_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, float*, uint8_t*);
int64_t gossamer_onebit_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                               float, float*);
int64_t gossamer_int8_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, const uint64_t*,
                             float*, int8_t*);
int64_t gossamer_largest(const float*, const float*, float*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t*,
                         float*);
}

namespace gossamer_sanitize {

constexpr int64_t kSizes[] = {1, 70001, 0, 131072, 4096, 90000, 3}, kTensors = 7, kCounts[] = {1, 700, 0, 1300, 4, 90, 0};

struct Made {
    std::vector<float> after, scales, mean, rest, units, values;
    std::vector<uint8_t> bits;
    std::vector<int8_t> codes;
    std::vector<int32_t> places;

    bool operator==(const Made& other) const {
        return after == other.after && scales == other.scales && mean == other.mean && rest == other.rest &&
               units == other.units && values == other.values && bits == other.bits && codes == other.codes &&
               places == other.places;
    }
};

// What one thread makes of numbers, where up to `threads` share its work.
inline Made made_by(int64_t threads, uint32_t seed) {
    int64_t n = 0, taken = 0, blocks = 0, bytes = 0;
    for (int64_t t = 0; t < kTensors; t++) {
        n += kSizes[t];
        taken += kCounts[t];
        blocks += (kSizes[t] + 63) / 64;
        bytes += (kSizes[t] + 7) / 8;
    }
    const auto size = [](int64_t count) { return static_cast<size_t>(count); };
    std::vector<float> x(size(n)), before(size(n));
    for (size_t i = 0; i < x.size(); i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
        before[i] = x[i] * 0.25f;
    }
    Made made;
    made.after = made.mean = made.rest = std::vector<float>(size(n));
    made.scales = made.units = std::vector<float>(size(blocks));
    made.bits = std::vector<uint8_t>(size(bytes));
    made.codes = std::vector<int8_t>(size(n));
    made.places = std::vector<int32_t>(size(taken));
    made.values = std::vector<float>(size(taken));
    const int64_t alone = gossamer_use_threads(threads);
    const uint64_t key = 7;
    int64_t bad = gossamer_onebit_encode(x.data(), before.data(), made.after.data(), kSizes, kTensors, 64,
                                         made.scales.data(), made.bits.data());
    const float* scales[] = {made.scales.data(), made.scales.data()};
    const uint8_t* bits[] = {made.bits.data(), made.bits.data()};
    bad |= gossamer_onebit_decode(scales, bits, 2, kSizes, kTensors, 64, 2.0f, made.mean.data());
    bad |= gossamer_int8_encode(x.data(), nullptr, nullptr, kSizes, kTensors, 64, &key, made.units.data(),
                                made.codes.data());
    bad |= gossamer_largest(x.data(), before.data(), made.rest.data(), n, kSizes, kCounts, kTensors, made.places.data(),
                            made.values.data()) ^ taken;
    before[size(n / 2)] = 1.0f / 0.0f;
    bad |= gossamer_onebit_encode(x.data(), before.data(), before.data(), kSizes, kTensors, 64, made.units.data(),
                                  made.bits.data()) != gossamer::kNotFinite;
    made.units.clear();  // good for nothing now, as are these
    made.bits.clear();
    gossamer_use_threads(alone);
    if (bad) {
        std::fprintf(stderr, "sanitize_threads: an answer is wrong\n");
        std::abort();
    }
    return made;
}

inline void sanitize_threads() {
    const Made truth[] = {made_by(1, 0), made_by(1, 1), made_by(1, 2)};
    for (int round = 0; round < 3; round++) {
        std::vector<std::thread> callers;
        for (uint32_t seed = 0; seed < 3; seed++) {
            callers.emplace_back([&truth, seed, round] {
                if (made_by(2 + (seed + static_cast<uint32_t>(round)) % 3, seed) == truth[seed]) return;
                std::fprintf(stderr, "sanitize_threads: several threads made something else\n");
                std::abort();
            });
        }
        for (std::thread& caller : callers) caller.join();
    }
}

}  // namespace gossamer_sanitize
