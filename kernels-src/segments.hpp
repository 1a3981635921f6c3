// What a quantising kernel walks over: tensors side by side, cut into blocks, blocks into chunks.

#pragma once

#include "common.hpp"
#include "level.hpp"

namespace gossamer {

// Iterations of the loop that follows touch different elements, also where `after` is `before`.
#if defined(__clang__)
#define GOSSAMER_APART _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define GOSSAMER_APART _Pragma("GCC ivdep")
#else
#define GOSSAMER_APART
#endif

// Into the first cache, soon to be read; harmless where there is no memory.
#if defined(__GNUC__) || defined(__clang__)
#define GOSSAMER_FETCH(address) __builtin_prefetch(address, 0, 3)
#else
#define GOSSAMER_FETCH(address) static_cast<void>(address)
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GOSSAMER_FETCH_TO_WRITE(address) __builtin_prefetch(address, 1, 3)
#else
#define GOSSAMER_FETCH_TO_WRITE(address) static_cast<void>(address)
#endif

// Entries whose codes are made at a time. A multiple of 8 and of 5: their bytes begin at a byte's boundary.
constexpr int64_t kChunk = 1280;

// Fewer, where as many of the next block are fetched meanwhile: so many can be on their way at once.
constexpr int64_t kFetched = 320;

// The most entries in a block whose sum is taken by halves.
constexpr int64_t kLargestBlock = 16384;

// w = x + before, or x.
template <bool Owed>
struct Wanted {
    const float* x;
    const float* before;

    GOSSAMER_INLINE float operator[](int64_t i) const {
        if constexpr (Owed) {
            return x[i] + before[i];
        } else {
            return x[i];
        }
    }

    GOSSAMER_INLINE Wanted from(int64_t i) const { return {x + i, Owed ? before + i : nullptr}; }

    // Have the next n entries ready in a moment.
    GOSSAMER_INLINE void fetch(int64_t n) const {
        for (int64_t i = 0; i < n; i += 16) {
            GOSSAMER_FETCH(x + i);
            if constexpr (Owed) GOSSAMER_FETCH(before + i);
        }
    }
};

#if GOSSAMER_X86
// Whole cache lines around the caches; returns how many entries those are. to: at a line's beginning.
__attribute__((target("avx512f"))) inline int64_t stream_lines(float* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
    return i;
}
#endif

// Where results go. Written around the caches where a buffer is too large for them, so that its old contents are not
// fetched first; callers hand over a chunk at a time, which is still in the first cache.
struct Output {
    static constexpr int64_t kStreamedFrom = int64_t{1} << 19;  // elements

    float* to;
    bool streamed;

    Output(float* to, int64_t total) : to(to), streamed(GOSSAMER_X86 && total >= kStreamedFrom) {}

    GOSSAMER_INLINE void put(int64_t place, const float* from, int64_t n) const {
        int64_t i = 0;
#if GOSSAMER_X86
        if (streamed) {
            float* at = to + place;
            for (; i < n && reinterpret_cast<uintptr_t>(at + i) % 64; i++) at[i] = from[i];
            if (level() == Level::kAvx512) i += stream_lines(at + i, from + i, n - i);
            for (; i + 4 <= n; i += 4) _mm_stream_ps(at + i, _mm_loadu_ps(from + i));
        }
#endif
        std::memcpy(to + place + i, from + i, sizeof(float) * static_cast<size_t>(n - i));
    }

    // What was put is there for every thread.
    GOSSAMER_INLINE void finish() const {
#if GOSSAMER_X86
        if (streamed) _mm_sfence();
#endif
    }
};

GOSSAMER_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Entries that one round of a loop over bytes makes, with the widest vectors.
constexpr int64_t kRound = 64;

// How many entries to make where `count` are wanted. A whole round costs less than a part of one; where the buffer of
// `total` goes on, what is made too much is made again or thrown away.
GOSSAMER_INLINE int64_t whole_rounds(int64_t place, int64_t count, int64_t total) {
    const int64_t more = (count + kRound - 1) / kRound * kRound;
    return place + more <= total ? more : count;
}

GOSSAMER_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

GOSSAMER_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

GOSSAMER_INLINE bool finite(float x) { return magnitude_of(x) < kInfinity; }

GOSSAMER_INLINE int64_t encoded(bool all_finite) { return all_finite ? kDone : kNotFinite; }

// A run of whole blocks.
struct Part {
    int64_t tensor = 0;       // that the first is in,
    int64_t at = 0;           // from this entry on; it may be the end, and the next tensor begins
    int64_t place = 0;        // where that is in the buffer
    int64_t end = INT64_MAX;  // where the last one ends; beyond the buffer where that is not known
    int64_t index = 0;        // how many blocks there are before
};

// Tensors of these sizes, side by side, in blocks; no block reaches from one into the next.
struct Spans {
    const int64_t* sizes;
    int64_t tensors;
    int64_t block;
    Part part = {};

    GOSSAMER_INLINE int64_t total() const {
        int64_t n = 0;
        for (int64_t t = 0; t < tensors; t++) n += sizes[t];
        return n;
    }

    int64_t blocks() const {
        int64_t n = 0;
        for (int64_t t = 0; t < tensors; t++) n += (sizes[t] + block - 1) / block;
        return n;
    }

    // Where this part's loops may write, and nobody else does.
    GOSSAMER_INLINE int64_t limit() const { return smaller(part.end, total()); }

    // The bytes before this part, of codes so many to a byte or of so many bits; tensors begin with a byte.
    GOSSAMER_INLINE int64_t bytes_before(int64_t per_byte, int64_t bits = 1) const {
        int64_t n = (part.at * bits + per_byte - 1) / per_byte;
        for (int64_t t = 0; t < part.tensor; t++) n += (sizes[t] * bits + per_byte - 1) / per_byte;
        return n;
    }

    // visit(tensor, place, count) for every block of this part, until one answers false.
    template <typename Visit>
    GOSSAMER_INLINE bool every_block(Visit visit) const {
        int64_t start = part.place - part.at, at = part.at;  // start: of the tensor
        for (int64_t t = part.tensor; t < tensors && start < part.end; t++, at = 0) {
            for (; at < sizes[t] && start + at < part.end; at += block) {
                if (!visit(t, start + at, smaller(block, sizes[t] - at))) return false;
            }
            start += sizes[t];
        }
        return true;
    }
};

// visit(start, count) for every chunk of `count` entries.
template <int64_t Chunk = kChunk, typename Visit>
GOSSAMER_INLINE void every_chunk(int64_t count, Visit visit) {
    static_assert(Chunk <= kChunk && Chunk % 8 == 0);
    for (int64_t at = 0; at < count; at += Chunk) visit(at, smaller(Chunk, count - at));
}

// The largest magnitude, as bits; kInfinity or more where one is not finite.
template <typename Entries>
GOSSAMER_INLINE uint32_t largest_magnitude(Entries w, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = larger(most, magnitude_of(w[i]));
    return most;
}

// The sum of 2 Half numbers, by halves: of a known length, it is made without loops.
template <int64_t Half, typename Number>
GOSSAMER_INLINE Number sum_of_known(Number* room) {
    for (int64_t i = 0; i < Half; i++) room[i] += room[i + Half];
    if constexpr (Half > 1) return sum_of_known<Half / 2>(room);
    return room[0];
}

// The sum of so many numbers, a power of two: the second half is added to the first until one number is left.
template <typename Number>
GOSSAMER_INLINE Number halved(Number* numbers, int64_t count) {
    constexpr int64_t kKnown = 128;
    int64_t half = count / 2;
    for (; half > kKnown; half /= 2) {
        GOSSAMER_APART
        for (int64_t i = 0; i < half; i++) numbers[i] += numbers[i + half];
    }
    if (half == kKnown) return sum_of_known<kKnown>(numbers);
    for (; half; half /= 2) {
        for (int64_t i = 0; i < half; i++) numbers[i] += numbers[i + half];
    }
    return numbers[0];
}

// The sum of term(0) to term(n - 1), none negative, by halves as if filled up with zeros to a power of two. room: half
// that power.
template <typename Number, typename Term>
GOSSAMER_INLINE Number sum_by_halves(Term term, int64_t n, Number* room) {
    if (n == 1) return term(0);
    int64_t half = 1;
    while (2 * half < n) half *= 2;
    for (int64_t i = 0; i < n - half; i++) room[i] = term(i) + term(i + half);
    for (int64_t i = n - half; i < half; i++) room[i] = term(i);
    return halved(room, half);
}

}  // namespace gossamer
