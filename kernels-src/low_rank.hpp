// Where matrices and their thin factors lie, and vectors to multiply them with.

#pragma once

#include "common.hpp"
#include "segments.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#define INLINED __attribute__((always_inline))

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are only passed to functions that are inlined
#endif

namespace gossamer {

constexpr int64_t kLanes = 16;
constexpr int64_t kPage = 4096 / sizeof(float);
constexpr int64_t kLong = 256;      // columns of a row that is written by itself
constexpr int64_t kGroup = 4;       // columns of a factor that are computed together
constexpr int64_t kStage = 1024;    // entries of whole rows that lie in the first cache between two looks
constexpr int64_t kWidth = 2048;    // columns whose sums lie in a near cache
constexpr int64_t kAhead = 3 * kLanes;
constexpr int64_t kTogether = 64;   // rows that are added up before their sum is added to the others'

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// Where a tensor and its factors lie. A matrix: rows by columns from `at`, p from `left`, q from `right`. What is none
// has no rows and `columns` entries, which lie from `left` on where matrices have their p.
struct Place {
    int64_t at, rows, columns, left, right;

    GOSSAMER_INLINE int64_t numel() const { return rows ? rows * columns : columns; }
};

GOSSAMER_INLINE int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

GOSSAMER_INLINE Lanes lanes(const float* from) {
    Lanes found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

GOSSAMER_INLINE void put_lanes(float* to, const Lanes& value) { std::memcpy(to, &value, sizeof value); }

GOSSAMER_INLINE Lanes all(float x) { return Lanes{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The first `count` entries, below kLanes, with zeros behind them. end: where the memory ends.
GOSSAMER_INLINE Lanes some_lanes(const float* from, int64_t count, const float* end) {
    alignas(64) static constexpr uint32_t kMasks[2 * kLanes] = {
        ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    alignas(64) float room[kLanes] = {};
    if (from + kLanes > end) {
        for (int64_t i = 0; i < count; i++) room[i] = from[i];
        return lanes(room);
    }
    LaneBits bits, mask;
    std::memcpy(&bits, from, sizeof bits);
    std::memcpy(&mask, kMasks + kLanes - count, sizeof mask);
    bits &= mask;
    Lanes found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

// Floats at a page's beginning. A processor takes a load for one of what was just stored where their addresses end in
// the same 12 bits, and waits; so those ends are chosen.
class Floats {
  public:
    explicit Floats(int64_t count) : room_(static_cast<size_t>(count + kPage)) {
        void* at = room_.data();
        size_t space = room_.size() * sizeof(float);
        begin_ = static_cast<float*>(std::align(4096, static_cast<size_t>(count) * sizeof(float), at, space));
    }

    Floats(const Floats&) = delete;
    GOSSAMER_INLINE float* data() const { return begin_; }

  private:
    std::vector<float> room_;
    float* begin_;
};

// A thin factor, column after column, with zeros up to whole lanes and to a whole group of columns.
class Columns {
  public:
    // ahead: by how many entries each column's loads are before what is stored meanwhile, and the next column's.
    Columns(int64_t most_rows, int64_t rank, int64_t ahead = 0)
        : rank_(rank),
          ahead_(ahead),
          room_((rounded_up(rank, kGroup) + 1) * (rounded_up(most_rows, ahead ? kPage : kLanes) + ahead)) {}

    GOSSAMER_INLINE void take(const float* thin, int64_t rows) {
        clear(rows);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < rank_; k++) column(k)[i] = thin[i * rank_ + k];
        }
    }

    GOSSAMER_INLINE void clear(int64_t rows) {
        stride_ = rounded_up(rows, ahead_ && rows >= kLong ? kPage : kLanes) + ahead_;
        std::fill(column(0), column(rounded_up(rank_, kGroup)), 0.0f);
    }

    GOSSAMER_INLINE void give(float* thin, int64_t rows) const {
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < rank_; k++) thin[i * rank_ + k] = column(k)[i];
        }
    }

    GOSSAMER_INLINE float* column(int64_t k) const { return room_.data() + ahead_ + k * stride_; }
    GOSSAMER_INLINE int64_t groups() const { return (rank_ + kGroup - 1) / kGroup; }
    GOSSAMER_INLINE int64_t rank() const { return rank_; }

  private:
    int64_t rank_, ahead_, stride_ = 0;
    Floats room_;
};

struct Extent {
    int64_t rows = 0, columns = 0;  // the most of any matrix

    Extent(const Place* places, int64_t tensors) {
        for (int64_t t = 0; t < tensors; t++) {
            if (places[t].rows) rows = std::max(rows, places[t].rows), columns = std::max(columns, places[t].columns);
        }
    }

    int64_t stage() const { return std::max(kStage, columns) + 2 * kLanes; }
};

template <typename Work>
GOSSAMER_INLINE int64_t with_memory(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

}  // namespace gossamer
