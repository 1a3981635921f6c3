// Random valid and malformed input for the functions of quantize.cpp and dequantize.cpp; part of sanitize.cpp.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "common.hpp"

extern "C" {
int64_t gossamer_int8_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, const uint64_t*,
                             float*, int8_t*);
int64_t gossamer_onebit_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, float*, uint8_t*);
int64_t gossamer_twobit_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, double, float*,
                               uint8_t*);
int64_t gossamer_ternary_encode(const float*, float*, const int64_t*, int64_t, const float*, uint64_t, int64_t, uint8_t*);
int64_t gossamer_magnitudes(const float*, const int64_t*, int64_t, float*);
int64_t gossamer_squares(const float*, const int64_t*, int64_t, int64_t, double*);
int64_t gossamer_levels_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, int64_t, int64_t,
                               uint64_t, float*, uint8_t*);
int64_t gossamer_int8_decode(const float* const*, const int8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                             float, float*);
int64_t gossamer_onebit_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                               float, float*);
int64_t gossamer_twobit_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                               int64_t, float, float*);
int64_t gossamer_ternary_decode(const uint8_t* const*, int64_t, const float*, const int64_t*, int64_t, int64_t, int64_t,
                                float, float*);
int64_t gossamer_levels_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                               int64_t, int64_t, float, float*);
}

namespace gossamer_sanitize {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

inline std::mt19937_64& random_bits() {
    static std::mt19937_64 bits(2);
    return bits;
}

inline int64_t any_below(int64_t n) { return static_cast<int64_t>(random_bits()() % static_cast<uint64_t>(n)); }

inline void must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_quantize: %s\n", what);
    std::abort();
}

// Tensors with data, and what travels for them.
struct Case {
    std::vector<int64_t> sizes;
    int64_t n = 0, tensors = 0;
    Floats x, before, after, out;
    bool owed = any_below(2) == 1, spoilt = false;

    Case() {
        static const int64_t kSizes[] = {0, 1, 2, 5, 7, 8, 9, 63, 64, 65, 319, 320, 321, 1000, 5000};
        for (tensors = any_below(5); static_cast<int64_t>(sizes.size()) < tensors;) {
            sizes.push_back(kSizes[any_below(15)]);
            n += sizes.back();
        }
        std::normal_distribution<float> normal;
        const float size = any_below(4) ? 1.0f : any_below(2) ? 1e-42f : 1e15f;
        for (int64_t i = 0; i < n; i++) {
            x.push_back(normal(random_bits()) * size);
            before.push_back(normal(random_bits()) * size);
        }
        if (n && any_below(8) == 0) {
            x[static_cast<size_t>(any_below(n))] = any_below(2) ? NAN : -INFINITY;
            spoilt = true;
        }
        after.resize(x.size());
        out.assign(x.size(), 7.0f);
    }

    const float* kept() const { return owed ? before.data() : nullptr; }
    float* left() { return owed ? after.data() : nullptr; }

    size_t packed(int64_t bits_or_entries, bool entries) const {
        int64_t bytes = 0;
        for (const int64_t size : sizes) {
            bytes += entries ? (size + bits_or_entries - 1) / bits_or_entries : (size * bits_or_entries + 7) / 8;
        }
        return static_cast<size_t>(bytes);
    }

    size_t blocks(int64_t block) const { return packed(block, true); }

    // What was encoded comes back, less what is left; what is damaged is refused, or means something else.
    void check(int64_t answer, uint8_t* codes, size_t count, const std::function<int64_t()>& decode) {
        must(answer == (spoilt ? gossamer::kNotFinite : gossamer::kDone), "an encoder answers something else");
        if (spoilt) return;
        must(decode() == gossamer::kDone, "a payload of an encoder was refused");
        for (size_t i = 0; owed && i < x.size(); i++) {
            const float w = x[i] + before[i], sum = out[i] + after[i];
            must(std::fabs(w - sum) <= 1e-4f * (std::fabs(w) + std::fabs(out[i])) + 1e-37f, "something was lost");
        }
        for (int64_t attempt = 0; attempt < 4 && count; attempt++) {
            codes[any_below(static_cast<int64_t>(count))] = static_cast<uint8_t>(random_bits()());
            out.assign(x.size(), 7.0f);
            const int64_t found = decode();
            must(found == gossamer::kDone || found == gossamer::kMalformed, "a decoder answers something else");
            for (const float each : out) must(found == gossamer::kDone || each == 7.0f, "written, then refused");
        }
    }
};

inline void int8() {
    Case all;
    const int64_t block = 1 + any_below(300);
    const uint64_t key = random_bits()();
    Floats scales(all.blocks(block));
    std::vector<int8_t> codes(all.x.size());
    const int64_t answer =
        gossamer_int8_encode(all.x.data(), all.kept(), all.left(), all.sizes.data(), all.tensors, block,
                             any_below(2) ? &key : nullptr, scales.data(), codes.data());
    const float* heard[] = {scales.data(), scales.data()};
    const int8_t* told[] = {codes.data(), codes.data()};
    all.check(answer, reinterpret_cast<uint8_t*>(codes.data()), codes.size(), [&] {
        return gossamer_int8_decode(heard, told, 2, all.sizes.data(), all.tensors, block, 2.0f, all.out.data());
    });
}

inline void onebit() {
    Case all;
    const int64_t block = int64_t{8} << any_below(12);
    Floats scales(all.blocks(block));
    Bytes codes(all.packed(8, true));
    const int64_t answer = gossamer_onebit_encode(all.x.data(), all.kept(), all.left(), all.sizes.data(), all.tensors,
                                                  block, scales.data(), codes.data());
    const float* heard[] = {scales.data(), scales.data()};
    const uint8_t* told[] = {codes.data(), codes.data()};
    all.check(answer, codes.data(), codes.size(), [&] {
        return gossamer_onebit_decode(heard, told, 2, all.sizes.data(), all.tensors, block, 2.0f, all.out.data());
    });
}

inline void twobit() {
    Case all;
    const int64_t block = int64_t{8} << any_below(12);
    Floats thresholds(all.blocks(block), static_cast<float>(any_below(20)) / 10);
    Bytes codes(all.packed(4, true));
    const int64_t answer =
        gossamer_twobit_encode(all.x.data(), all.kept(), all.left(), all.sizes.data(), all.tensors, block,
                               static_cast<double>(any_below(2)) / 2, thresholds.data(), codes.data());
    const float* heard[] = {thresholds.data(), thresholds.data()};
    const uint8_t* told[] = {codes.data(), codes.data()};
    const int64_t bytes = static_cast<int64_t>(codes.size());
    all.check(answer, codes.data(), codes.size(), [&] {
        return gossamer_twobit_decode(heard, told, 2, all.sizes.data(), all.tensors, block, bytes, 2.0f,
                                      all.out.data());
    });
}

inline void ternary() {
    Case all;
    all.owed = false;
    const int64_t per_byte = 4 + any_below(2);
    Floats scales(all.sizes.size());
    Bytes codes(all.packed(per_byte, true));
    const int64_t bytes = static_cast<int64_t>(codes.size());
    const int64_t largest = gossamer_magnitudes(all.x.data(), all.sizes.data(), all.tensors, scales.data());
    must(largest == (all.spoilt ? gossamer::kNotFinite : gossamer::kDone), "magnitudes answers something else");
    const int64_t block = int64_t{8} << any_below(12);
    std::vector<double> sums(all.blocks(block));
    gossamer_squares(all.x.data(), all.sizes.data(), all.tensors, block, sums.data());
    std::vector<float> left(all.x.size());
    const int64_t answer =
        gossamer_ternary_encode(all.x.data(), any_below(2) ? left.data() : nullptr, all.sizes.data(), all.tensors,
                                scales.data(), random_bits()(), per_byte, codes.data());
    const std::vector<const uint8_t*> told(static_cast<size_t>(1 + any_below(300)), codes.data());
    all.check(answer, codes.data(), codes.size(), [&] {
        return gossamer_ternary_decode(told.data(), static_cast<int64_t>(told.size()), scales.data(), all.sizes.data(),
                                       all.tensors, per_byte, bytes, 3.0f, all.out.data());
    });
}

inline void levels() {
    Case all;
    const int64_t block = int64_t{8} << any_below(12), most = (int64_t{1} << (1 + any_below(15))) - 1;
    const int64_t count = 1 + any_below(most);
    int64_t bits = 0;
    while (2 * count >> bits) bits++;
    Floats norms(all.blocks(block));
    Bytes codes(all.packed(bits, false));
    const int64_t answer =
        gossamer_levels_encode(all.x.data(), all.kept(), all.left(), all.sizes.data(), all.tensors, block, count, bits,
                               random_bits()(), norms.data(), codes.data());
    const float* heard[] = {norms.data(), norms.data()};
    const uint8_t* told[] = {codes.data(), codes.data()};
    all.check(answer, codes.data(), codes.size(), [&] {
        return gossamer_levels_decode(heard, told, 2, all.sizes.data(), all.tensors, block, count, bits, 2.0f,
                                      all.out.data());
    });
}

}  // namespace gossamer_sanitize

inline void sanitize_quantize(int64_t share) {
    for (int64_t round = 0; round < 300 / share; round++) {
        gossamer_sanitize::int8();
        gossamer_sanitize::onebit();
        gossamer_sanitize::twobit();
        gossamer_sanitize::ternary();
        gossamer_sanitize::levels();
    }
}
