// Walsh-Hadamard transform: src/gossamer/base/kernels/reference/hadamard.py in C++, bit for bit.
//
// Blocks are transformed in the first cache, eight entries to a vector and three levels to a pass, and written from
// there. Every level is the same sums and differences as in plain torch, in the same order.

#include <algorithm>
#include <cmath>

#include "common.hpp"
#include "segments.hpp"

namespace gossamer {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kAtOnce = 1024;  // entries at least that are written at a time

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__clang__)
#define GOSSAMER_SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(32)));
#define GOSSAMER_SHUFFLED(v, ...) __builtin_shuffle(v, (Lanes{__VA_ARGS__}))
#endif

// The levels within a vector: distances 1, 2 and 4. b - a is b + a (-1), to the bit.
GOSSAMER_INLINE void within(Eight& v) {
    v = GOSSAMER_SHUFFLED(v, 1, 0, 3, 2, 5, 4, 7, 6) + v * (Eight{1, -1, 1, -1, 1, -1, 1, -1});
    v = GOSSAMER_SHUFFLED(v, 2, 3, 0, 1, 6, 7, 4, 5) + v * (Eight{1, 1, -1, -1, 1, 1, -1, -1});
    v = GOSSAMER_SHUFFLED(v, 4, 5, 6, 7, 0, 1, 2, 3) + v * (Eight{1, 1, 1, 1, -1, -1, -1, -1});
}

GOSSAMER_INLINE Eight& eight(float* at) { return *reinterpret_cast<Eight*>(at); }

GOSSAMER_INLINE void butterfly(Eight& a, Eight& b) {
    const Eight sum = a + b;
    b = a - b;
    a = sum;
}

// The levels h, 2 h and 4 h of m entries.
GOSSAMER_INLINE void three_levels(float* x, int64_t m, int64_t h) {
    for (int64_t base = 0; base < m; base += 8 * h) {
        for (int64_t i = base; i < base + h; i += kLanes) {
            Eight v[8];
            for (int64_t k = 0; k < 8; k++) v[k] = eight(x + i + k * h);
            for (int64_t k = 0; k < 8; k += 2) butterfly(v[k], v[k + 1]);
            for (int64_t k = 0; k < 8; k += 4) butterfly(v[k], v[k + 2]), butterfly(v[k + 1], v[k + 3]);
            for (int64_t k = 0; k < 4; k++) butterfly(v[k], v[k + 4]);
            for (int64_t k = 0; k < 8; k++) eight(x + i + k * h) = v[k];
        }
    }
}

// The level h of m entries.
GOSSAMER_INLINE void one_level(float* x, int64_t m, int64_t h) {
    for (int64_t base = 0; base < m; base += 2 * h) {
        for (int64_t i = base; i < base + h; i++) {
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
}

GOSSAMER_INLINE void levels(float* x, int64_t m) {
    int64_t h = 1;
    if (m >= kLanes) {
        for (int64_t i = 0; i < m; i += kLanes) within(eight(x + i));
        h = kLanes;
        for (; 8 * h <= m; h *= 8) three_levels(x, m, h);
    }
    for (; h < m; h *= 2) one_level(x, m, h);
}

struct Transform {
    const float* signs;
    bool inverse;

    // room = the transform of the m entries at x, a power of two
    GOSSAMER_INLINE void operator()(const float* x, int64_t m, float* room) const {
        const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(m)));
        if (inverse) {
            for (int64_t i = 0; i < m; i++) room[i] = x[i] * scale;
            levels(room, m);
            for (int64_t i = 0; i < m; i++) room[i] *= signs[i];
        } else {
            for (int64_t i = 0; i < m; i++) room[i] = x[i] * signs[i] * scale;
            levels(room, m);
        }
    }
};

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// out: may be x itself. signs: `block` numbers, 1 or -1. kMisfit where the block is no power of two, or too large;
// kOverflow where a result is not finite; all are written.
GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_hadamard(const float* x, const int64_t* sizes, int64_t tensors,
                                                          int64_t block, const float* signs, int64_t inverse,
                                                          float* out) {
    if (block < 1 || block > kLargestBlock || (block & (block - 1))) return kMisfit;
    alignas(64) float room[kLargestBlock];
    const int64_t chunk = std::max(block, kAtOnce);  // whole blocks: both are powers of two
    const Transform transform{signs, inverse != 0};
    const Spans spans{sizes, tensors, chunk};
    Output result{out, x == out ? 0 : spans.total()};
    uint32_t most = 0;
    spans.every_block([&](int64_t, int64_t place, int64_t count) __attribute__((always_inline)) {
        int64_t at = 0;
        for (; at + block <= count; at += block) transform(x + place + at, block, room + at);
        for (int64_t m = block / 2; m; m /= 2) {
            if ((count - at) & m) transform(x + place + at, m, room + at), at += m;
        }
        most = larger(most, largest_magnitude(room, count));
        result.put(place, room, count);
        return true;
    });
    result.finish();
    return most < kInfinity ? kDone : kOverflow;
}
