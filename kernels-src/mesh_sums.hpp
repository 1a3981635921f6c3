// Sums of messages, compiled for several instruction sets. Included by mesh.cpp only.

#pragma once

#include "common.hpp"
#include "sums.hpp"

namespace gossamer {

GOSSAMER_CLONES void add_up_float32(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Plain<float>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_float64(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Plain<double>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_bfloat16(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Narrow<Bfloat16, 0x7fc0>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_float16(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Narrow<Float16, 0x7e00>>(terms, count, n, divisor, out);
}

static void add_up_any(int32_t format, const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    switch (format) {
        case kFloat32: return add_up_float32(terms, count, n, divisor, out);
        case kFloat64: return add_up_float64(terms, count, n, divisor, out);
        case kBfloat16: return add_up_bfloat16(terms, count, n, divisor, out);
        case kFloat16: return add_up_float16(terms, count, n, divisor, out);
    }
}

}  // namespace gossamer
