// What some codes are made by: the largest magnitude of each tensor, the sum of squares of each block.

#include "bits.hpp"
#include "common.hpp"
#include "parts.hpp"
#include "segments.hpp"

#define INLINED __attribute__((always_inline))

namespace gossamer {
namespace {

// most: as bits, of each block.
GOSSAMER_CLONES int64_t magnitudes_part(const float* x, Spans spans, uint32_t* most) {
    most += spans.part.index;
    spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        *most++ = largest_magnitude(x + place, n);
        return true;
    });
    return kDone;
}

GOSSAMER_CLONES int64_t squares_part(const float* x, Spans spans, double* sums) {
    alignas(64) double room[kLargestBlock / 2];
    sums += spans.part.index;
    spans.every_block([&](int64_t, int64_t place, int64_t n) INLINED {
        const auto square = [&](int64_t i) INLINED {
            const double w = x[place + i];
            return w * w;
        };
        *sums++ = sum_by_halves(square, n, room);
        return true;
    });
    return kDone;
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

GOSSAMER_EXPORT int64_t gossamer_magnitudes(const float* x, const int64_t* sizes, int64_t tensors, float* magnitudes) {
    const Spans spans{sizes, tensors, kLeastPart};
    std::vector<uint32_t> found(static_cast<size_t>(spans.blocks()));
    in_parts(spans, [&](const Spans& part) { return magnitudes_part(x, part, found.data()); });
    uint32_t most = 0;
    const uint32_t* next = found.data();
    for (int64_t t = 0; t < tensors; t++) {
        uint32_t here = 0;
        for (int64_t i = 0; i < ceil_div(sizes[t], kLeastPart); i++) here = larger(here, *next++);
        magnitudes[t] = float_of(here);
        most = larger(most, here);
    }
    return encoded(most < kInfinity);
}

// The sum of squares of each block, in doubles.
GOSSAMER_EXPORT int64_t gossamer_squares(const float* x, const int64_t* sizes, int64_t tensors, int64_t block,
                                         double* sums) {
    return in_parts({sizes, tensors, block}, [&](const Spans& part) { return squares_part(x, part, sums); });
}
