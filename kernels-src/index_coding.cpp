// Ascending places in few bits, and the sums of entries at places: gossamer.base.kernels.reference.index_coding.

#include "common.hpp"

#include <algorithm>
#include <new>
#include <vector>

namespace gossamer {
namespace {

constexpr int64_t kBitmap = -1;
constexpr int64_t kBlock = 1 << 14;  // elements of a sum that stay in a near cache while all payloads are added

int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

// Up to eight bytes as a number, least first, whatever the machine's own order.
GOSSAMER_INLINE uint64_t load(const uint8_t* bytes, int64_t count) {
    uint64_t word = 0;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (count >= 8) {
        std::memcpy(&word, bytes, 8);
        return word;
    }
#endif
    for (int64_t i = 0; i < std::min<int64_t>(count, 8); ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
    return word;
}

GOSSAMER_INLINE int first_bit(uint64_t word) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(word);
#else
    int bit = 0;
    for (; !(word & 1); word >>= 1) ++bit;
    return bit;
#endif
}

// Bits written one field after another.
class Writer {
  public:
    explicit Writer(uint8_t* bytes) : bytes_(bytes) {}

    GOSSAMER_INLINE void write(uint32_t field, int64_t bits) {
        word_ |= static_cast<uint64_t>(field) << filled_;
        for (filled_ += bits; filled_ >= 8; filled_ -= 8, word_ >>= 8) *bytes_++ = static_cast<uint8_t>(word_);
    }

    void finish() {
        if (filled_) *bytes_++ = static_cast<uint8_t>(word_);
    }

  private:
    uint8_t* bytes_;
    uint64_t word_ = 0;
    int64_t filled_ = 0;
};

// Calls visit(bit) for every bit that is set, ascending, until it answers false; answers whether it never did.
template <typename Visit>
GOSSAMER_INLINE bool each_bit(const uint8_t* bytes, int64_t count, Visit visit) {
    for (int64_t at = 0; at < count; at += 8) {
        for (uint64_t word = load(bytes + at, count - at); word; word &= word - 1) {
            if (!visit(at * 8 + first_bit(word))) return false;
        }
    }
    return true;
}

// Whether a code of so many places has this size.
bool fits(int64_t count, int64_t n, int64_t room, int64_t low, int64_t coded_bytes) {
    if (count < 0 || count > room || n < 0 || low < kBitmap || low > 30) return false;
    if (low == kBitmap) return coded_bytes == bytes_of(n);
    return coded_bytes == bytes_of(room * low) + bytes_of(room + (std::max<int64_t>(n - 1, 0) >> low));
}

GOSSAMER_INLINE void set_bit(uint8_t* bytes, int64_t bit) { bytes[bit >> 3] |= static_cast<uint8_t>(1 << (bit & 7)); }

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// coded: all of the code's bytes. low: how many low bits are written as they are, or -1 for a bitmap. Answers
// kMalformed where places do not ascend or are not below n, or the code has another size.
GOSSAMER_EXPORT int64_t gossamer_encode_places(const int32_t* places, int64_t count, int64_t n, int64_t room,
                                               int64_t low, uint8_t* coded, int64_t coded_bytes) {
    if (!fits(count, n, room, low, coded_bytes)) return kMalformed;
    std::fill(coded, coded + coded_bytes, uint8_t{0});
    uint8_t* highs = coded + (low == kBitmap ? 0 : bytes_of(room * low));
    Writer lows(coded);
    const uint32_t mask = low > 0 ? (1u << low) - 1 : 0;
    int64_t previous = -1;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t place = places[i];
        if (place <= previous || place >= n) return kMalformed;
        previous = place;
        if (low == kBitmap) {
            set_bit(highs, place);
        } else {
            lows.write(static_cast<uint32_t>(place) & mask, low);
            set_bit(highs, (place >> low) + i);
        }
    }
    lows.finish();
    return kDone;
}

// places: room for `count`. Answers kMalformed for what no encoder wrote.
GOSSAMER_EXPORT int64_t gossamer_decode_places(const uint8_t* coded, int64_t coded_bytes, int64_t count, int64_t n,
                                               int64_t room, int64_t low, int32_t* places) {
    if (!fits(count, n, room, low, coded_bytes)) return kMalformed;
    const int64_t low_bytes = low == kBitmap ? 0 : bytes_of(room * low);
    const uint64_t mask = low > 0 ? (1u << low) - 1 : 0;
    int64_t found = 0, previous = -1;
    const bool ascending = each_bit(coded + low_bytes, coded_bytes - low_bytes, [&](int64_t place) {
        if (found == count) return false;
        if (low > 0) {
            const int64_t at = found * low;
            const uint64_t least = load(coded + (at >> 3), low_bytes - (at >> 3)) >> (at & 7) & mask;
            place = ((place - found) << low) | static_cast<int64_t>(least);
        } else if (low == 0) {
            place -= found;
        }
        if (place <= previous || place >= n) return false;
        previous = place;
        places[found++] = static_cast<int32_t>(place);
        return true;
    });
    return ascending && found == count ? kDone : kMalformed;
}

// out[place] += value / divisor, payload after payload; over zeros unless `onto`. Places ascend and are below n: they
// come from gossamer_decode_places.
GOSSAMER_EXPORT int64_t gossamer_scatter(const int32_t* const* places, const float* const* values,
                                         const int64_t* counts, int64_t payloads, float* out, int64_t n,
                                         int64_t divisor, int64_t onto) {
    const float over = static_cast<float>(divisor);
    std::vector<int64_t> next;
    try {
        next.resize(static_cast<size_t>(payloads));
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        // Onto something else, no block needs to be visited: all of it counts as one.
        const int64_t end = onto ? n : std::min(begin + kBlock, n);
        if (!onto) std::memset(out + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
        for (int64_t p = 0; p < payloads; ++p) {
            int64_t i = next[p];
            for (; i < counts[p] && places[p][i] < end; ++i) out[places[p][i]] += values[p][i] / over;
            next[p] = i;
        }
        if (onto) break;
    }
    return kDone;
}
