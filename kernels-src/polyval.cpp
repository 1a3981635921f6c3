// POLYVAL: a polynomial over GF(2^128), evaluated at a secret point; hashes what travels at the speed of memory.
//
//     hash(X_1 ... X_n) = X_1 H^n + X_2 H^(n-1) + ... + X_n H        a b x^-128 mod x^128 + x^127 + x^126 + x^121 + 1
//
// Two texts of n blocks collide for at most n of the 2^128 points H. Only multiplications without carry: what it takes
// depends on the length alone. Blocks go in groups, each multiplied by its own power of H, with one reduction a group.
// source: Gueron, Langley, Lindell 2019, RFC 8452, section 3; Gueron & Kounavis 2010, Information Processing Letters

#include <algorithm>
#include <cstring>

#include "common.hpp"
#include "level.hpp"

namespace gossamer {
namespace {

constexpr int64_t kBlockBytes = 16;
[[maybe_unused]] constexpr int64_t kPowers = 32;  // H^32 ... H^1, as a group of so many blocks wants them

// What comes between two calls. The same sizes are in src/gossamer/base/kernels/polyval.py.
struct Running {
    uint8_t sum[kBlockBytes];
    uint8_t partial[kBlockBytes];
    int64_t filled;  // bytes of it
};

#if GOSSAMER_X86

#define GOSSAMER_CARRYLESS __attribute__((target("sse2,pclmul"), always_inline)) inline
#define GOSSAMER_WIDE_CARRYLESS __attribute__((target("avx512f,pclmul,vpclmulqdq"), always_inline)) inline

GOSSAMER_CARRYLESS __m128i load(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
GOSSAMER_CARRYLESS void store(uint8_t* at, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), v); }

// A product of 255 bits: low + middle x^64 + high x^128; sums of products are sums of these.
struct Product {
    __m128i low, middle, high;
};

GOSSAMER_CARRYLESS void add_product(Product& to, __m128i a, __m128i b) {
    to.low = _mm_xor_si128(to.low, _mm_clmulepi64_si128(a, b, 0x00));
    to.high = _mm_xor_si128(to.high, _mm_clmulepi64_si128(a, b, 0x11));
    const __m128i crossed = _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
    to.middle = _mm_xor_si128(to.middle, crossed);
}

// Times x^-128: twice, the lower half is made zero by a multiple of the modulus, and what is above it moves down.
GOSSAMER_CARRYLESS __m128i reduced(const Product& p) {
    const __m128i modulus = _mm_set_epi64x(static_cast<int64_t>(0xc200000000000000u), 1);
    __m128i low = _mm_xor_si128(p.low, _mm_slli_si128(p.middle, 8));
    for (int half = 0; half < 2; half++) {
        low = _mm_xor_si128(_mm_clmulepi64_si128(low, modulus, 0x10), _mm_shuffle_epi32(low, 0x4e));
    }
    return _mm_xor_si128(low, _mm_xor_si128(p.high, _mm_srli_si128(p.middle, 8)));
}

GOSSAMER_CARRYLESS __m128i times(__m128i a, __m128i b) {
    Product p{_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    add_product(p, a, b);
    return reduced(p);
}

__attribute__((target("sse2,pclmul"))) void powers_of(const uint8_t* h, uint8_t* powers) {
    __m128i power = load(h);
    for (int64_t i = kPowers - 1; i >= 0; i--) {
        store(powers + kBlockBytes * i, power);
        power = times(power, load(h));
    }
}

// Whole blocks, `group` at a time; returns how many are done.
template <int64_t kGroup>
GOSSAMER_CARRYLESS int64_t narrow(const uint8_t* powers, __m128i& sum, const uint8_t* data, int64_t blocks) {
    powers += kBlockBytes * (kPowers - kGroup);
    int64_t done = 0;
    for (; blocks - done >= kGroup; done += kGroup, data += kBlockBytes * kGroup) {
        Product p{_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
        add_product(p, _mm_xor_si128(sum, load(data)), load(powers));
        for (int64_t i = 1; i < kGroup; i++) add_product(p, load(data + kBlockBytes * i), load(powers + kBlockBytes * i));
        sum = reduced(p);
    }
    return done;
}

GOSSAMER_WIDE_CARRYLESS __m128i folded(__m512i v) {
    const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

__attribute__((target("avx512f,pclmul,vpclmulqdq"))) int64_t wide(const uint8_t* powers, __m128i& sum,
                                                                   const uint8_t* data, int64_t blocks) {
    constexpr int64_t kRegisters = kPowers / 4;
    __m512i power[kRegisters];
    for (int64_t i = 0; i < kRegisters; i++) power[i] = _mm512_loadu_si512(powers + 64 * i);
    int64_t done = 0;
    for (; blocks - done >= kPowers; done += kPowers, data += kBlockBytes * kPowers) {
        __m512i low = _mm512_setzero_si512(), middle = low, high = low;
        for (int64_t i = 0; i < kRegisters; i++) {
            __m512i x = _mm512_loadu_si512(data + 64 * i);
            if (i == 0) x = _mm512_xor_si512(x, _mm512_zextsi128_si512(sum));
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(x, power[i], 0x00));
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(x, power[i], 0x11));
            const __m512i a = _mm512_clmulepi64_epi128(x, power[i], 0x01), b = _mm512_clmulepi64_epi128(x, power[i], 0x10);
            middle = _mm512_ternarylogic_epi64(middle, a, b, 0x96);
        }
        sum = reduced({folded(low), folded(middle), folded(high)});
    }
    return done;
}

__attribute__((target("sse2,pclmul"))) void absorb(const uint8_t* powers, uint8_t* state, const uint8_t* data,
                                                   int64_t blocks) {
    static const bool four_at_a_time = __builtin_cpu_supports("vpclmulqdq");
    __m128i sum = load(state);
    int64_t done = 0;
    if (blocks >= kPowers && four_at_a_time && level() == Level::kAvx512) done = wide(powers, sum, data, blocks);
    done += narrow<8>(powers, sum, data + kBlockBytes * done, blocks - done);
    narrow<1>(powers, sum, data + kBlockBytes * done, blocks - done);
    store(state, sum);
}

bool serves() { return __builtin_cpu_supports("pclmul"); }

#else

void powers_of(const uint8_t*, uint8_t*) {}
void absorb(const uint8_t*, uint8_t*, const uint8_t*, int64_t) {}
bool serves() { return false; }

#endif

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// h: 16 bytes; powers: room for 512. kMisfit where the processor does not multiply without carry.
GOSSAMER_EXPORT int64_t gossamer_polyval_powers(const uint8_t* h, uint8_t* powers) {
    if (!serves()) return kMisfit;
    powers_of(h, powers);
    return kDone;
}

// running: 40 bytes, zero at first.
GOSSAMER_EXPORT int64_t gossamer_polyval_update(const uint8_t* powers, void* running, const uint8_t* data, int64_t n) {
    Running& now = *static_cast<Running*>(running);
    if (now.filled > 0) {
        const int64_t taken = std::min(n, kBlockBytes - now.filled);
        std::memcpy(now.partial + now.filled, data, static_cast<size_t>(taken));
        now.filled += taken;
        data += taken;
        n -= taken;
        if (now.filled < kBlockBytes) return kDone;
        absorb(powers, now.sum, now.partial, 1);
    }
    const int64_t whole = n / kBlockBytes;
    if (whole > 0) absorb(powers, now.sum, data, whole);
    now.filled = n - kBlockBytes * whole;
    if (now.filled > 0) std::memcpy(now.partial, data + kBlockBytes * whole, static_cast<size_t>(now.filled));
    return kDone;
}

// The hash of what was given so far, and of zeros up to a whole block.
GOSSAMER_EXPORT int64_t gossamer_polyval_digest(const uint8_t* powers, const void* running, uint8_t* hash) {
    Running last = *static_cast<const Running*>(running);
    if (last.filled > 0) {
        std::memset(last.partial + last.filled, 0, static_cast<size_t>(kBlockBytes - last.filled));
        absorb(powers, last.sum, last.partial, 1);
    }
    std::memcpy(hash, last.sum, static_cast<size_t>(kBlockBytes));
    return kDone;
}
