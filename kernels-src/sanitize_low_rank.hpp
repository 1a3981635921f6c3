// Random matrices for the functions of low_rank.cpp and orthonormal.cpp; part of sanitize.cpp.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common.hpp"

extern "C" {
int64_t gossamer_low_rank_project(const float*, const float*, float*, int64_t, const int64_t*, int64_t, int64_t,
                                  const float*, float, float*);
int64_t gossamer_low_rank_back(const float*, int64_t, const int64_t*, int64_t, int64_t, const float*, float*, float*);
int64_t gossamer_low_rank_expand(int64_t, const int64_t*, int64_t, int64_t, const float*, const float*, float*);
int64_t gossamer_orthonormal(float*, const int64_t*, int64_t, int64_t);
}

namespace gossamer_sanitize {

inline void low_rank_must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_low_rank: %s\n", what);
    std::abort();
}

// Tensors side by side, some of which are matrices.
struct Bucket {
    int64_t rank, numel = 0, left = 0, right = 0;
    std::vector<int64_t> numbers;
    std::vector<std::pair<int64_t, int64_t>> shapes;  // (rows, columns); no rows: as many entries as columns

    Bucket(std::mt19937& random, int64_t tensors, int64_t most_rows, int64_t most_columns) : rank(1 + random() % 9) {
        for (int64_t t = 0; t < tensors; t++) {
            const int64_t rows = rank + static_cast<int64_t>(random() % static_cast<uint64_t>(most_rows));
            const int64_t columns = static_cast<int64_t>(random() % static_cast<uint64_t>(most_columns));
            shapes.emplace_back(columns && random() % 4 ? rows : 0, columns);
            left += rank * shapes.back().first;
        }
        int64_t p = 0, other = left;
        for (const auto& [rows, columns] : shapes) {
            numbers.insert(numbers.end(), {numel, rows, columns, rows ? p : other, right});
            numel += rows ? rows * columns : columns;
            p += rank * rows;
            right += rows ? rank * columns : 0;
            other += rows ? 0 : columns;
        }
        left = other;
    }

    int64_t tensors() const { return static_cast<int64_t>(shapes.size()); }
};

inline std::vector<float> normal_numbers(std::mt19937& random, int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> found(static_cast<size_t>(n));
    for (float& each : found) each = normal(random);
    return found;
}

// What was sent and what is left are what was wanted, and a factor's columns are at right angles.
inline void low_rank(std::mt19937& random, int64_t tensors, int64_t most_rows, int64_t most_columns) {
    const Bucket bucket(random, tensors, most_rows, most_columns);
    const auto x = normal_numbers(random, bucket.numel), before = normal_numbers(random, bucket.numel);
    const auto q = normal_numbers(random, bucket.right);
    std::vector<float> after(x.size(), 7.0f), first(static_cast<size_t>(bucket.left), 7.0f), out(x.size(), 7.0f);
    std::vector<float> mine(q.size(), 7.0f), spoilt = x;
    const int64_t* numbers = bucket.numbers.data();
    const bool owed = random() % 2;
    const auto project = [&](const std::vector<float>& from) {
        return gossamer_low_rank_project(from.data(), owed ? before.data() : nullptr, owed ? after.data() : nullptr,
                                         bucket.numel, numbers, bucket.tensors(), bucket.rank, q.data(), FLT_MAX,
                                         first.data());
    };
    if (bucket.numel) {
        spoilt[random() % spoilt.size()] = random() % 2 ? NAN : -INFINITY;
        low_rank_must(project(spoilt) == gossamer::kNotFinite, "what is not finite was taken");
    }
    low_rank_must(project(x) == gossamer::kDone, "numbers were refused");
    const std::vector<float> wanted = owed ? after : x;
    low_rank_must(gossamer_orthonormal(first.data(), numbers, bucket.tensors(), bucket.rank) == gossamer::kDone,
                  "no columns");
    after = wanted;
    low_rank_must(gossamer_low_rank_back(after.data(), bucket.numel, numbers, bucket.tensors(), bucket.rank,
                                         first.data(), mine.data(), random() % 4 ? after.data() : nullptr) == 0,
                  "no product");
    const bool whole = after == wanted;
    low_rank_must(gossamer_low_rank_expand(bucket.numel, numbers, bucket.tensors(), bucket.rank, first.data(),
                                           mine.data(), out.data()) == 0,
                  "no expansion");
    for (size_t i = 0; i < x.size() && !whole; i++) {
        low_rank_must(wanted[i] - out[i] == after[i], "what is left is not what is left");
    }
    int64_t at = 0;
    for (const auto& [rows, columns] : bucket.shapes) {
        for (int64_t k = 0; k < bucket.rank * bucket.rank && rows; k++) {
            double sum = 0;
            for (int64_t i = 0; i < rows; i++) {
                const float* row = first.data() + at + i * bucket.rank;
                sum += static_cast<double>(row[k / bucket.rank]) * static_cast<double>(row[k % bucket.rank]);
            }
            low_rank_must(std::fabs(sum - (k / bucket.rank == k % bucket.rank)) < 1e-4, "columns are no unit columns");
        }
        at += bucket.rank * rows;
    }
}

}  // namespace gossamer_sanitize

inline void sanitize_low_rank(int64_t share) {
    std::mt19937 random(5);
    for (int64_t round = 0; round < 150 / share; round++) {
        gossamer_sanitize::low_rank(random, round % 7, 20, 70);
        gossamer_sanitize::low_rank(random, 1 + round % 3, 150, 20);
        gossamer_sanitize::low_rank(random, 1, 12, 600);
    }
    gossamer_sanitize::low_rank(random, 2, 10, 5000);
    gossamer_sanitize::low_rank(random, 2, 400, 3000);  // large enough to be written around the caches
    const int64_t low[] = {0, 1, 40, 0, 0};
    float first[2] = {};
    gossamer_sanitize::low_rank_must(gossamer_orthonormal(first, low, 1, 2) == gossamer::kMisfit, "too few rows");
}
