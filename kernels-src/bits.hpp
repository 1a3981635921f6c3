// Small codes, several to a byte: src/gossamer/base/kernels/reference/bits.py in C++.

#pragma once

#include "common.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes are packed in words, lowest byte first: this needs a little-endian machine"
#endif

namespace gossamer {

template <typename Word>
GOSSAMER_INLINE Word load(const void* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

template <typename Word>
GOSSAMER_INLINE void store(void* to, Word word) {
    std::memcpy(to, &word, sizeof word);
}

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

constexpr int64_t kSlack = 8;  // entries that may be touched behind an array of codes

// Codes below 2^`Width`, one to a byte of a word, are moved together in steps that many words take at once.
template <typename Word, int Width>
struct Packing {
    static constexpr int kPerByte = 8 / Width;
    static constexpr int kBase = 1 << Width;
    static_assert(sizeof(Word) == kPerByte);

    static GOSSAMER_INLINE uint8_t packed(const uint8_t* codes) {
        Word word = load<Word>(codes);
        for (int step = 8 - Width; step < 4 * kPerByte; step *= 2) word |= word >> step;
        return static_cast<uint8_t>(word);
    }
};

using Bits = Packing<uint64_t, 1>;
using Pairs = Packing<uint32_t, 2>;

// Five codes below 3 to a byte. Of every 320 codes of a tensor, byte i has those at i, 64 + i, ... 256 + i, so that
// many bytes are made or read at once; in what is left of a tensor, neighbours share a byte.
struct Trits {
    static constexpr int kPerByte = 5;
    static constexpr int kBase = 3;
    static constexpr int64_t kApart = 64;
    static constexpr int64_t kGroup = kApart * kPerByte;

    static GOSSAMER_INLINE void pack_group(const uint8_t* codes, uint8_t* bytes) {
        for (int64_t i = 0; i < kApart; i++) {
            uint8_t byte = codes[4 * kApart + i];
            for (int64_t k = 3; k >= 0; k--) byte = static_cast<uint8_t>(3 * byte + codes[k * kApart + i]);
            bytes[i] = byte;
        }
    }

    // digit(k, i, code) for every code of a group: the k-th in byte i.
    template <typename Digit>
    static GOSSAMER_INLINE void unpack_group(const uint8_t* bytes, Digit digit) {
        for (int64_t i = 0; i < kApart; i++) {
            uint16_t rest = bytes[i];
            for (int64_t k = 0; k < kPerByte; k++) {
                const uint16_t third = static_cast<uint16_t>(rest * 171) >> 9;  // right below 512
                digit(k, i, static_cast<uint16_t>(rest - 3 * third));
                rest = third;
            }
        }
    }

    // One multiplication weighs five codes and adds them up in one byte, without a carry into it.
    static GOSSAMER_INLINE uint8_t packed(const uint8_t* codes) {
        constexpr uint64_t kWeights = 0x0103091B51;  // 1, 3, 9, 27, 81
        return static_cast<uint8_t>(load<uint64_t>(codes) * kWeights >> 32);
    }
};

// Pack n codes; those behind them up to kSlack become zero.
template <typename Packing>
GOSSAMER_INLINE void pack(uint8_t* codes, int64_t n, uint8_t* bytes) {
    std::memset(codes + n, 0, kSlack);
    if constexpr (Packing::kBase == Trits::kBase) {
        for (; n >= Trits::kGroup; n -= Trits::kGroup, codes += Trits::kGroup, bytes += Trits::kApart) {
            Trits::pack_group(codes, bytes);
        }
    }
    for (int64_t i = 0; i < ceil_div(n, Packing::kPerByte); i++) {
        bytes[i] = Packing::packed(codes + i * Packing::kPerByte);
    }
}

// For each byte a word, the k-th byte of which is Values[code k].
template <typename Packing, uint8_t... Values>
struct Table {
    uint64_t of[256];

    constexpr Table() : of() {
        constexpr uint8_t values[] = {Values...};
        for (int byte = 0; byte < 256; byte++) {
            int rest = byte;
            for (int k = 0; k < Packing::kPerByte; k++, rest /= Packing::kBase) {
                of[byte] |= static_cast<uint64_t>(values[rest % Packing::kBase]) << (8 * k);
            }
        }
    }
};

// Whether no byte is more than codes make, and the last byte of every tensor holds zeros where it holds no codes.
template <typename Packing>
GOSSAMER_INLINE bool well_packed(const uint8_t* bytes, const int64_t* sizes, int64_t tensors) {
    int limits[Packing::kPerByte + 1] = {1};  // what a byte stays below, by how many codes it holds
    for (int k = 0; k < Packing::kPerByte; k++) limits[k + 1] = limits[k] * Packing::kBase;
    int most = 0;
    bool clean = true;
    for (int64_t t = 0; t < tensors; t++) {
        const int64_t whole = sizes[t] / Packing::kPerByte, rest = sizes[t] % Packing::kPerByte;
        for (int64_t i = 0; i < whole; i++) most = bytes[i] > most ? bytes[i] : most;
        bytes += whole;
        if (rest) clean &= *bytes++ < limits[rest];
    }
    return clean && most < limits[Packing::kPerByte];
}

// Whether no pair of bits among the bytes is the code `Wrong`.
template <int Wrong>
GOSSAMER_INLINE bool no_pair_is(const uint8_t* bytes, int64_t n) {
    constexpr uint8_t kAll = 0x55 * Wrong, kLow = 0x55;
    uint8_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t equal = static_cast<uint8_t>(~(bytes[i] ^ kAll));
        found |= equal & (equal >> 1) & kLow;
    }
    return !found;
}

// What a stream below is for widths that fill bytes.
template <typename Word, int Width>
struct Even {
    using Code = uint8_t;

    GOSSAMER_INLINE int64_t bytes(int64_t n) const { return ceil_div(n * Width, 8); }
    GOSSAMER_INLINE Code* codes(uint8_t*, Code* room) const { return room; }
    GOSSAMER_INLINE void put(Code* codes, int64_t n, uint8_t* to) const { pack<Packing<Word, Width>>(codes, n, to); }
};

// A code to a byte: they are made where they belong.
template <>
struct Even<uint8_t, 8> {
    using Code = uint8_t;

    GOSSAMER_INLINE int64_t bytes(int64_t n) const { return n; }
    GOSSAMER_INLINE Code* codes(uint8_t* to, Code*) const { return to; }
    GOSSAMER_INLINE void put(Code*, int64_t, uint8_t*) const {}
};

// A stream of codes of `bits` bits each, 1 to 16, lowest bit first. Eight codes fill `bits` bytes.
struct Stream {
    using Code = uint16_t;
    static constexpr int64_t kLargest = 1280;

    int bits;

    GOSSAMER_INLINE int64_t bytes(int64_t n) const { return ceil_div(n * bits, 8); }

    // Where codes are to be made that `put` brings to their bytes.
    GOSSAMER_INLINE Code* codes(uint8_t*, Code* room) const { return room; }

    // n codes, at most kLargest; those behind them up to kSlack become zero.
    GOSSAMER_INLINE void put(Code* codes, int64_t n, uint8_t* to) const {
        alignas(64) uint8_t near[2 * kLargest + kSlack];
        pack(codes, n, near);
        std::memcpy(to, near, static_cast<size_t>(bytes(n)));
    }

    // to: bytes(n), and 8 writable behind them.
    GOSSAMER_INLINE void pack(Code* codes, int64_t n, uint8_t* to) const {
        std::memset(codes + n, 0, kSlack * sizeof *codes);
        const int half = bits / 2, odd = 4 * (bits % 2);  // four codes: `half` bytes and `odd` bits
        for (int64_t i = 0; i < n; i += 8, to += bits) {
            const uint64_t a = closer(load<uint64_t>(codes + i)), b = closer(load<uint64_t>(codes + i + 4));
            store(to, a);
            store(to + half, b << odd | a >> 4 * half >> 4 * half);
        }
    }

    // from: bytes(n), and 8 readable behind them; n codes, and up to kSlack written behind them.
    GOSSAMER_INLINE void unpack(const uint8_t* from, int64_t n, uint16_t* codes) const {
        if (bits == 8) {
            for (int64_t i = 0; i < n; i++) codes[i] = from[i];
            return;
        }
        const int half = bits / 2, odd = 4 * (bits % 2);
        for (int64_t i = 0; i < n; i += 8, from += bits) {
            store(codes + i, apart(load<uint64_t>(from)));
            store(codes + i + 4, apart(load<uint64_t>(from + half) >> odd));
        }
    }

  private:
    // Four codes of 16 bits -> 4 `bits` bits.
    GOSSAMER_INLINE uint64_t closer(uint64_t codes) const {
        const uint64_t pairs = (codes & 0x0000FFFF0000FFFFu) | (codes & 0xFFFF0000FFFF0000u) >> (16 - bits);
        return (pairs & 0xFFFFFFFFu) | pairs >> 32 << 2 * bits;
    }

    GOSSAMER_INLINE uint64_t apart(uint64_t packed) const {
        const uint64_t two = (uint64_t{1} << 2 * bits) - 1, one = ((uint64_t{1} << bits) - 1) * 0x0000000100000001u;
        const uint64_t pairs = (packed & two) | (packed >> 2 * bits & two) << 32;
        return (pairs & one) | (pairs >> bits & one) << 16;
    }
};

}  // namespace gossamer
