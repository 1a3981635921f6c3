// CRC-32 as zlib has it (IEEE 802.3, bits reflected), at the speed of memory: sixteen bytes or more are folded onto the
// ones that follow by multiplications without carry.
//
// A remainder does not change where a block v of 128 bits is replaced by v x^D mod P, added to the block D bits later:
//     v x^D = low(v) x^(D+32) + high(v) x^(D-32)        two multiplications 64 x 33 bits
// source: Gopal, Ozturk, Guilford, Wolrich, Feghali, Dixon, Karakoyunlu 2009, Intel white paper 323102

#include <array>
#include <cstring>

#include "common.hpp"
#include "level.hpp"

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace gossamer {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;

// -- byte by byte, and eight at a time ----------------------------------------------------------------------------------

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ (r & 1 ? kPolynomial : 0); }

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables tables() {
    Tables made{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t r = byte;
        for (int bit = 0; bit < 8; bit++) r = times_x(r);
        made[0][byte] = r;
    }
    for (size_t further = 1; further < 8; further++) {
        for (size_t byte = 0; byte < 256; byte++) {
            const uint32_t r = made[further - 1][byte];
            made[further][byte] = (r >> 8) ^ made[0][r & 0xff];
        }
    }
    return made;
}

constexpr Tables kTables = tables();

uint32_t plain(uint32_t r, const uint8_t* data, int64_t n) {
#if defined(__ARM_FEATURE_CRC32)
    for (; n >= 8; n -= 8, data += 8) {
        uint64_t word;
        std::memcpy(&word, data, sizeof word);
        r = __crc32d(r, word);
    }
#else
    for (; n >= 8; n -= 8, data += 8) {
        const uint32_t first = r ^ (data[0] | uint32_t{data[1]} << 8 | uint32_t{data[2]} << 16 | uint32_t{data[3]} << 24);
        r = kTables[7][first & 0xff] ^ kTables[6][first >> 8 & 0xff] ^ kTables[5][first >> 16 & 0xff] ^
            kTables[4][first >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
            kTables[0][data[7]];
    }
#endif
    for (; n > 0; n--, data++) r = (r >> 8) ^ kTables[0][(r ^ *data) & 0xff];
    return r;
}

#if GOSSAMER_X86

// -- by folding -----------------------------------------------------------------------------------------------------

// x^exponent mod P, as a multiplication of reflected bits wants it.
constexpr int64_t power_of_x(int exponent) {
    uint32_t r = 0x80000000u;
    for (int i = 0; i < exponent; i++) r = times_x(r);
    return static_cast<int64_t>(uint64_t{r} << 1);
}

// For blocks whose next one comes `distance` bits later.
template <int Distance>
struct Fold {
    static constexpr int64_t kLow = power_of_x(Distance + 32);
    static constexpr int64_t kHigh = power_of_x(Distance - 32);
};

static_assert(Fold<512>::kLow == 0x0154442bd4 && Fold<512>::kHigh == 0x01c6e41596, "the white paper's k1 and k2");
static_assert(Fold<128>::kLow == 0x01751997d0 && Fold<128>::kHigh == 0x00ccaa009e, "the white paper's k3 and k4");

#define GOSSAMER_FOLDING __attribute__((target("sse2,pclmul"), always_inline)) inline
#define GOSSAMER_WIDE_FOLDING __attribute__((target("avx512f,pclmul,vpclmulqdq"), always_inline)) inline

GOSSAMER_FOLDING __m128i load(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

template <int Distance>
GOSSAMER_FOLDING __m128i folded(__m128i v, __m128i onto) {
    const __m128i by = _mm_set_epi64x(Fold<Distance>::kHigh, Fold<Distance>::kLow);
    const __m128i both = _mm_xor_si128(_mm_clmulepi64_si128(v, by, 0x00), _mm_clmulepi64_si128(v, by, 0x11));
    return _mm_xor_si128(both, onto);
}

// What is left of whole blocks once they are folded into v, and of the n bytes that follow.
GOSSAMER_FOLDING uint32_t finished(__m128i v, const uint8_t* data, int64_t n) {
    for (; n >= 16; n -= 16, data += 16) v = folded<128>(v, load(data));
    uint8_t block[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(block), v);
    return plain(plain(0, block, 16), data, n);
}

__attribute__((target("sse2,pclmul"))) uint32_t narrow(uint32_t r, const uint8_t* data, int64_t n) {
    if (n < 64) return plain(r, data, n);
    __m128i v[4] = {load(data), load(data + 16), load(data + 32), load(data + 48)};
    v[0] = _mm_xor_si128(v[0], _mm_cvtsi32_si128(static_cast<int>(r)));
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64) {
        for (int i = 0; i < 4; i++) v[i] = folded<512>(v[i], load(data + 16 * i));
    }
    return finished(folded<128>(folded<128>(folded<128>(v[0], v[1]), v[2]), v[3]), data, n);
}

template <int Distance>
GOSSAMER_WIDE_FOLDING __m512i folded(__m512i v, __m512i onto) {
    const __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(Fold<Distance>::kHigh, Fold<Distance>::kLow));
    const __m512i low = _mm512_clmulepi64_epi128(v, by, 0x00), high = _mm512_clmulepi64_epi128(v, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96);
}

__attribute__((target("avx512f,pclmul,vpclmulqdq"))) uint32_t wide(uint32_t r, const uint8_t* data, int64_t n) {
    if (n < 256) return narrow(r, data, n);
    __m512i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(data + 64 * i);
    v[0] = _mm512_xor_si512(v[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(r))));
    for (data += 256, n -= 256; n >= 256; data += 256, n -= 256) {
        for (int i = 0; i < 4; i++) v[i] = folded<2048>(v[i], _mm512_loadu_si512(data + 64 * i));
    }
    __m512i all = folded<512>(folded<512>(folded<512>(v[0], v[1]), v[2]), v[3]);
    for (; n >= 64; data += 64, n -= 64) all = folded<512>(all, _mm512_loadu_si512(data));
    __m128i one = _mm512_extracti32x4_epi32(all, 0);
    one = folded<128>(one, _mm512_extracti32x4_epi32(all, 1));
    one = folded<128>(one, _mm512_extracti32x4_epi32(all, 2));
    one = folded<128>(one, _mm512_extracti32x4_epi32(all, 3));
    return finished(one, data, n);
}

#endif

}  // namespace
}  // namespace gossamer

// The CRC-32 of what `before` is the CRC-32 of, followed by n bytes; 0 is the CRC-32 of nothing.
GOSSAMER_EXPORT int64_t gossamer_crc32(const uint8_t* data, int64_t n, int64_t before) {
    const uint32_t r = ~static_cast<uint32_t>(before);
#if GOSSAMER_X86
    static const bool multiplies = __builtin_cpu_supports("pclmul");
    static const bool multiplies_four = multiplies && __builtin_cpu_supports("vpclmulqdq");
    const gossamer::Level level = gossamer::level();
    if (level == gossamer::Level::kAvx512 && multiplies_four) return static_cast<uint32_t>(~gossamer::wide(r, data, n));
    if (level != gossamer::Level::kPortable && multiplies) return static_cast<uint32_t>(~gossamer::narrow(r, data, n));
#endif
    return static_cast<uint32_t>(~gossamer::plain(r, data, n));
}
