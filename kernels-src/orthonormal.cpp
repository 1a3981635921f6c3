// Orthonormal columns: src/gossamer/base/kernels/reference/gram_schmidt.py in C++, bit for bit.

#include "low_rank.hpp"

#include <cmath>

namespace gossamer {
namespace {

// Modified Gram-Schmidt in doubles, with every sum by halves.
struct GramSchmidt {
    int64_t rows, rank;
    std::vector<double> room, columns;

    GramSchmidt(int64_t most_rows, int64_t rank)
        : rows(0), rank(rank), room(1), columns(static_cast<size_t>(most_rows * rank)) {
        while (2 * room.size() < static_cast<size_t>(most_rows)) room.resize(2 * room.size());
    }

    GOSSAMER_INLINE double* column(int64_t k) { return columns.data() + k * rows; }

    // Of few rows there are many matrices: their sums are made without loops.
    GOSSAMER_INLINE double dot(const double* a, const double* b) {
        if (rows <= 16) return dot_of<8>(a, b);
        if (rows <= 32) return dot_of<16>(a, b);
        if (rows <= 64) return dot_of<32>(a, b);
        return sum_by_halves([&](int64_t i) INLINED { return a[i] * b[i]; }, rows, room.data());
    }

    // Of Half to 2 Half rows. Zeros behind them change nothing.
    template <int64_t Half>
    GOSSAMER_INLINE double dot_of(const double* a, const double* b) const {
        alignas(64) double products[2 * Half] = {};
        for (int64_t i = 0; i < rows; i++) products[i] = a[i] * b[i];
        return sum_of_known<Half>(products);
    }

    // The j-th unit vector less its part in the span of the columns before: those have length one.
    GOSSAMER_INLINE void become_unit(double* unit, int64_t j) {
        std::fill(unit, unit + rows, 0.0);
        unit[j] = 1.0;
        for (int64_t k = 0; k < j; k++) {
            const double* other = column(k);
            const double part = other[j];
            for (int64_t i = 0; i < rows; i++) unit[i] -= other[i] * part;
        }
    }

    GOSSAMER_INLINE void operator()(float* p, int64_t of_rows) {
        rows = of_rows;
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < rank; k++) column(k)[i] = p[i * rank + k];
        }
        std::vector<double> sizes(static_cast<size_t>(rank));
        for (int64_t k = 0; k < rank; k++) sizes[k] = std::sqrt(dot(column(k), column(k)));
        for (int64_t j = 0; j < rank; j++) {
            double* now = column(j);
            double norm = std::sqrt(dot(now, now));
            if (norm <= 1e-10 * sizes[j]) {
                become_unit(now, j);
                norm = std::sqrt(dot(now, now));
            }
            const double by = norm == 0.0 ? 1.0 : norm;
            for (int64_t i = 0; i < rows; i++) now[i] /= by;
            for (int64_t k = j + 1; k < rank; k++) {
                double* later = column(k);
                const double part = dot(now, later);
                for (int64_t i = 0; i < rows; i++) later[i] -= now[i] * part;
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < rank; k++) p[i * rank + k] = static_cast<float>(column(k)[i]);
        }
    }
};

}  // namespace
}  // namespace gossamer

using namespace gossamer;

// Every p becomes orthonormal columns that span its own. kMisfit where one has fewer rows than columns.
GOSSAMER_EXPORT GOSSAMER_CLONES int64_t gossamer_orthonormal(float* first, const int64_t* numbers, int64_t tensors,
                                                             int64_t rank) {
    const Place* places = reinterpret_cast<const Place*>(numbers);
    for (int64_t t = 0; t < tensors; t++) {
        if (places[t].rows && places[t].rows < rank) return kMisfit;
    }
    return with_memory([&]() INLINED {
        GramSchmidt orthonormal(Extent(places, tensors).rows, rank);
        for (int64_t t = 0; t < tensors; t++) {
            if (places[t].rows) orthonormal(first + places[t].left, places[t].rows);
        }
        return static_cast<int64_t>(kDone);
    });
}
