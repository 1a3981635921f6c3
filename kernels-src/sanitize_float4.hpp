// Random valid and malformed input for the functions of float4.cpp; part of sanitize.cpp.

#pragma once

#include "sanitize_quantize.hpp"

extern "C" {
int64_t gossamer_limit_instructions(int64_t limit);
int64_t gossamer_float4_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, float*, uint8_t*);
int64_t gossamer_sign_magnitude_encode(const float*, const float*, float*, const int64_t*, int64_t, int64_t, float*,
                                       uint8_t*);
int64_t gossamer_float4_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t, int64_t,
                               float, float*);
int64_t gossamer_sign_magnitude_decode(const float* const*, const uint8_t* const*, int64_t, const int64_t*, int64_t,
                                       int64_t, float, float*);
}

namespace gossamer_sanitize {

template <typename Encode, typename Decode>
void coded(Encode encode, Decode decode, int64_t block, size_t numbers, int64_t per_byte) {
    Case all;
    Floats told(all.blocks(block) * numbers);
    Bytes codes(all.packed(per_byte, true));
    const int64_t answer = encode(all.x.data(), all.kept(), all.left(), all.sizes.data(), all.tensors, block,
                                  told.data(), codes.data());
    const float* heard[] = {told.data(), told.data()};
    const uint8_t* packed[] = {codes.data(), codes.data()};
    all.check(answer, codes.data(), codes.size(), [&] {
        return decode(heard, packed, 2, all.sizes.data(), all.tensors, block, 2.0f, all.out.data());
    });
}

}  // namespace gossamer_sanitize

inline void sanitize_float4(int64_t share) {
    using namespace gossamer_sanitize;
    for (int64_t round = 0; round < 300 / share; round++) {
        gossamer_limit_instructions(round % 3);
        coded(gossamer_float4_encode, gossamer_float4_decode, 2 + 2 * any_below(300), 1, 2);
        coded(gossamer_sign_magnitude_encode, gossamer_sign_magnitude_decode, int64_t{8} << any_below(12), 2, 4);
    }
    gossamer_limit_instructions(2);
}
