// Matrices as two thin factors: src/gossamer/base/kernels/reference/low_rank.py in C++, a whole bucket at a time.
//
// What every worker computes from the same answers, orthonormal columns and p q^T, has the reference's order and bits.
// x q and x^T p are one worker's own: here sums of 16 lanes, or of 64 rows at a time, the same on every processor; a
// library's order is another.

#include "low_rank.hpp"

#include <type_traits>

namespace gossamer {
namespace {

// visit(first row, rows) for as many whole rows at a time as make `entries`, and at least one.
template <typename Visit>
GOSSAMER_INLINE void every_block_of_rows(const Place& place, int64_t entries, Visit visit) {
    const int64_t step = std::max<int64_t>(1, entries / std::max<int64_t>(1, place.columns));
    for (int64_t row = 0; row < place.rows; row += step) visit(row, smaller(step, place.rows - row));
}

// p = w q for one row of w: 16 sums each, of every 16th product, halved to one.
GOSSAMER_INLINE void row_times(const float* w, const float* end, int64_t columns, const Columns& q, float* p) {
    const int64_t whole = columns / kLanes * kLanes;
    for (int64_t group = 0; group < q.groups(); group++) {
        const float* from[kGroup];
        for (int64_t k = 0; k < kGroup; k++) from[k] = q.column(group * kGroup + k);
        Lanes sums[kGroup] = {};
        for (int64_t j = 0; j < whole; j += kLanes) {
            const Lanes now = lanes(w + j);
            for (int64_t k = 0; k < kGroup; k++) sums[k] += now * lanes(from[k] + j);
        }
        if (whole < columns) {
            const Lanes now = some_lanes(w + whole, columns - whole, end);
            for (int64_t k = 0; k < kGroup; k++) sums[k] += now * lanes(from[k] + whole);
        }
        for (int64_t k = 0; k < kGroup && group * kGroup + k < q.rank(); k++) {
            alignas(64) float room[kLanes];
            put_lanes(room, sums[k]);
            p[group * kGroup + k] = sum_of_known<kLanes / 2>(room);
        }
    }
}

template <bool Owed>
GOSSAMER_INLINE int64_t project(Wanted<Owed> x, Output after, int64_t total, const Place* places, int64_t tensors,
                                int64_t rank, const float* q, float limit, float* first) {
    const Extent extent(places, tensors);
    Columns columns(extent.columns, rank);
    const Floats stage(extent.stage());
    uint32_t most = 0;
    const auto look = [&](int64_t at, int64_t n) INLINED -> const float* {  // w, and what it leaves behind
        const Wanted<Owed> w = x.from(at);
        if constexpr (Owed) {
            float* to = stage.data();
            every_chunk<kFetched>(n, [&](int64_t i, int64_t count) INLINED {
                w.from(i + n + kStage).fetch(count);
                for (int64_t j = i; j < i + count; j++) {
                    const float now = w[j];
                    most = larger(most, magnitude_of(now));
                    to[j] = now;
                }
                after.put(at + i, to + i, count);
            });
            return to;
        } else {
            most = larger(most, largest_magnitude(w, n));
            return w.x;
        }
    };
    for (int64_t t = 0; t < tensors; t++) {
        const Place& place = places[t];
        if (!place.rows) {
            for (int64_t i = 0; i < place.columns; i += kStage) {
                const int64_t n = smaller(kStage, place.columns - i);
                std::memcpy(first + place.left + i, look(place.at + i, n), sizeof(float) * static_cast<size_t>(n));
            }
            continue;
        }
        columns.take(q + place.right, place.columns);
        every_block_of_rows(place, kStage, [&](int64_t row, int64_t rows) INLINED {
            const float* w = look(place.at + row * place.columns, rows * place.columns);
            const float* end = Owed ? stage.data() + extent.stage() : x.x + total;
            for (int64_t i = 0; i < rows; i++) {
                row_times(w + i * place.columns, end, place.columns, columns, first + place.left + (row + i) * rank);
            }
        });
    }
    after.finish();
    return encoded(most <= bits_of(limit));
}

// sums += w^T p for some rows of w and columns up to kWidth of them.
GOSSAMER_INLINE void add_rows(const float* w, const float* end, int64_t stride, int64_t rows, int64_t width,
                              const float* p, int64_t rank, Columns& sums) {
    for (int64_t i = 0; i < rows; i++, w += stride, p += rank) {
        for (int64_t group = 0; group < sums.groups(); group++) {
            float* to[kGroup];
            Lanes by[kGroup];
            for (int64_t k = 0; k < kGroup; k++) {
                const int64_t column = group * kGroup + k;
                to[k] = sums.column(column);
                by[k] = all(column < rank ? p[column] : 0.0f);
            }
            for (int64_t j = 0; j < width; j += kLanes) {
                const Lanes now = w + j + kLanes <= end ? lanes(w + j) : some_lanes(w + j, width - j, end);
                for (int64_t k = 0; k < kGroup; k++) put_lanes(to[k] + j, lanes(to[k] + j) + now * by[k]);
            }
        }
    }
}

// The same for four rows at once, in the same order.
GOSSAMER_INLINE void add_four_rows(const float* w, const float* end, int64_t stride, int64_t width, const float* p,
                                   int64_t rank, Columns& sums) {
    if (w + 3 * stride + rounded_up(width, kLanes) > end) return add_rows(w, end, stride, 4, width, p, rank, sums);
    for (int64_t group = 0; group < sums.groups(); group++) {
        float* to[kGroup];
        Lanes by[4][kGroup];
        for (int64_t k = 0; k < kGroup; k++) {
            const int64_t column = group * kGroup + k;
            to[k] = sums.column(column);
            for (int64_t i = 0; i < 4; i++) by[i][k] = all(column < rank ? p[i * rank + column] : 0.0f);
        }
        for (int64_t j = 0; j < width; j += kLanes) {
            for (int64_t i = 4; i < 8; i++) GOSSAMER_FETCH(w + i * stride + j);
            const Lanes a = lanes(w + j), b = lanes(w + stride + j);
            const Lanes c = lanes(w + 2 * stride + j), d = lanes(w + 3 * stride + j);
            for (int64_t k = 0; k < kGroup; k++) {
                Lanes sum = lanes(to[k] + j) + a * by[0][k];
                sum += b * by[1][k];
                sum += c * by[2][k];
                put_lanes(to[k] + j, sum + d * by[3][k]);
            }
        }
    }
}

// q = w^T p
GOSSAMER_INLINE void transposed_times(const float* w, const float* end, const Place& place, const float* p,
                                      int64_t rank, Columns& sums, Columns& part, float* q) {
    for (int64_t begin = 0; begin < place.columns; begin += kWidth) {
        const int64_t width = smaller(kWidth, place.columns - begin);
        sums.clear(width);
        for (int64_t row = 0; row < place.rows; row += kTogether) {
            const int64_t rows = smaller(kTogether, place.rows - row);
            part.clear(width);
            int64_t i = 0;
            for (; i + 4 <= rows; i += 4) {
                const int64_t at = row + i;
                add_four_rows(w + at * place.columns + begin, end, place.columns, width, p + at * rank, rank, part);
            }
            const int64_t at = row + i;
            add_rows(w + at * place.columns + begin, end, place.columns, rows - i, width, p + at * rank, rank, part);
            for (int64_t k = 0; k < rank; k++) {
                float* to = sums.column(k);
                const float* from = part.column(k);
                for (int64_t j = 0; j < width; j++) to[j] += from[j];
            }
        }
        sums.give(q + begin * rank, width);
    }
}

// to = p q^T, or w - p q^T, for one row; up to kLanes - 1 entries behind it are written, too.
template <int64_t Rank, bool Less>
GOSSAMER_INLINE void row_of_product(const float* w, const float* end, int64_t columns, const float* p, int64_t rank,
                                    const Columns& q, float* to) {
    Lanes by[Rank ? Rank : 1];
    const float* from[Rank ? Rank : 1];
    for (int64_t k = 0; k < (Rank ? Rank : 1); k++) by[k] = all(p[k]), from[k] = q.column(k);
    for (int64_t j = 0; j < columns; j += kLanes) {
        Lanes sum = by[0] * lanes(from[0] + j);
        for (int64_t k = 1; k < Rank; k++) sum += by[k] * lanes(from[k] + j);
        if constexpr (!Rank) {
            for (int64_t k = 1; k < rank; k++) sum += all(p[k]) * lanes(q.column(k) + j);
        }
        if constexpr (Less) {
            GOSSAMER_FETCH(w + j + kStage);
            sum = (w + j + kLanes <= end ? lanes(w + j) : some_lanes(w + j, columns - j, end)) - sum;
        }
        put_lanes(to + j, sum);
    }
}

template <bool Less>
GOSSAMER_INLINE void product(const float* w, const float* end, const Place& place, const float* p, int64_t rank,
                             const Columns& q, float* stage, const Output& out) {
    every_block_of_rows(place, place.columns < kLong ? kStage : 1, [&](int64_t row, int64_t rows) INLINED {
        const auto make = [&](auto known) INLINED {
            for (int64_t i = 0; i < rows; i++) {
                const float* from = Less ? w + (row + i) * place.columns : nullptr;
                row_of_product<decltype(known)::value, Less>(from, end, place.columns, p + (row + i) * rank, rank, q,
                                                             stage + i * place.columns);
            }
        };
        switch (rank) {
            case 1: make(std::integral_constant<int64_t, 1>{}); break;
            case 2: make(std::integral_constant<int64_t, 2>{}); break;
            case 4: make(std::integral_constant<int64_t, 4>{}); break;
            default: make(std::integral_constant<int64_t, 0>{});
        }
        out.put(place.at + row * place.columns, stage, rows * place.columns);
    });
}

GOSSAMER_INLINE int64_t back_project(const float* w, int64_t total, const Place* places, int64_t tensors, int64_t rank,
                                     const float* first, float* q, float* left) {
    const Extent extent(places, tensors);
    Columns sums(smaller(kWidth, extent.columns), rank), part(smaller(kWidth, extent.columns), rank);
    Columns columns(extent.columns, rank, kAhead);
    const Floats stage(extent.stage());
    const Output out{left, total};
    for (int64_t t = 0; t < tensors; t++) {
        const Place& place = places[t];
        if (place.rows) {
            const float *from = w + place.at, *p = first + place.left;
            transposed_times(from, w + total, place, p, rank, sums, part, q + place.right);
            if (!left) continue;
            columns.take(q + place.right, place.columns);
            product<true>(from, w + total, place, p, rank, columns, stage.data(), out);
        } else if (left) {
            std::fill(left + place.at, left + place.at + place.columns, 0.0f);
        }
    }
    out.finish();
    return kDone;
}

GOSSAMER_INLINE int64_t expand(int64_t total, const Place* places, int64_t tensors, int64_t rank, const float* first,
                               const float* q, float* to) {
    const Extent extent(places, tensors);
    Columns columns(extent.columns, rank, kAhead);
    const Floats stage(extent.stage());
    const Output out{to, total};
    for (int64_t t = 0; t < tensors; t++) {
        const Place& place = places[t];
        if (place.rows) {
            columns.take(q + place.right, place.columns);
            product<false>(nullptr, nullptr, place, first + place.left, rank, columns, stage.data(), out);
        } else if (place.columns) {
            out.put(place.at, first + place.left, place.columns);
        }
    }
    out.finish();
    return kDone;
}

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// first: p = w q of every matrix, and the entries of what is none, with w = x + before, which is written to `after`; or
// w = x, where `before` is null. kNotFinite where a magnitude is above `limit`. numbers: five to a tensor, a Place.
GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_low_rank_project(const float* x, const float* before, float* after,
                                                                  int64_t total, const int64_t* numbers,
                                                                  int64_t tensors, int64_t rank, const float* q,
                                                                  float limit, float* first) {
    const Place* places = reinterpret_cast<const Place*>(numbers);
    const Output left{after, total};
    return with_memory([&]() INLINED {
        const Wanted<true> owed{x, before};
        if (before) return project(owed, left, total, places, tensors, rank, q, limit, first);
        return project(Wanted<false>{x, nullptr}, left, total, places, tensors, rank, q, limit, first);
    });
}

// q = w^T p of every matrix; where `left` is not null, it becomes w - p q^T, and zero where nothing was cut. It may be w.
GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_low_rank_back(const float* w, int64_t total, const int64_t* numbers,
                                                               int64_t tensors, int64_t rank, const float* first,
                                                               float* q, float* left) {
    const Place* places = reinterpret_cast<const Place*>(numbers);
    return with_memory([&]() INLINED { return back_project(w, total, places, tensors, rank, first, q, left); });
}

// out = p q^T of every matrix, and what is none as it is.
GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_low_rank_expand(int64_t total, const int64_t* numbers, int64_t tensors,
                                                                 int64_t rank, const float* first, const float* q,
                                                                 float* out) {
    const Place* places = reinterpret_cast<const Place*>(numbers);
    return with_memory([&]() INLINED { return expand(total, places, tensors, rank, first, q, out); });
}
