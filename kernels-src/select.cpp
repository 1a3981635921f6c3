// Which entries travel: gossamer.base.kernels.reference.select, in one pass over memory.

#include "partition.hpp"
#include "parts.hpp"
#include "scan.hpp"
#include "small.hpp"

#include <cmath>
#include <memory>
#include <new>

namespace gossamer {
namespace {

constexpr uint32_t kNever = kMagnitude;  // a threshold that no finite number reaches
// Elements of a buffer, and of a tensor in it, from which on w is streamed. Smaller buffers stay in the caches for
// whoever reads them next; of smaller tensors much is written again, when what was dropped is given back.
constexpr int64_t kStreamedBuffer = 1 << 19, kStreamedTensor = 1 << 15;

Level g_limit = Level::kAvx512;

// Candidates of one tensor, and what choosing among them needs.
struct Scratch {
    static constexpr int64_t kSampled = 1 << 16;
    explicit Scratch(int64_t entries)
        : room(std::max(entries, kSampled)),
          places(new int32_t[room]),
          values(new float[room]),
          magnitudes(new uint32_t[room]) {}
    int64_t room;
    std::unique_ptr<int32_t[]> places;
    std::unique_ptr<float[]> values;
    std::unique_ptr<uint32_t[]> magnitudes;
};

// Each thread keeps up to 24 MiB from call to call, since touching fresh pages costs a tenth of a selection.
Scratch& scratch_for(int64_t entries) {
    constexpr int64_t kKept = 1 << 21;
    static thread_local std::unique_ptr<Scratch> held;
    if (!held || held->room < entries || (held->room > kKept && entries <= kKept)) {
        held.reset();
        held.reset(new Scratch(entries));
    }
    return *held;
}

int64_t candidates(int64_t size, int64_t count) { return std::min(size, 2 * count + 256); }

// Magnitudes have no sign bit, and signed numbers are compared in one instruction everywhere.
GOSSAMER_INLINE int64_t count_above(const uint32_t* magnitudes, int64_t n, uint32_t limit) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += static_cast<int32_t>(magnitudes[i]) > static_cast<int32_t>(limit);
    return found;
}

GOSSAMER_CLONES int64_t count_values_above(const float* values, int64_t n, uint32_t limit) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        found += static_cast<int32_t>(magnitude_of(values[i])) > static_cast<int32_t>(limit);
    }
    return found;
}

GOSSAMER_INLINE uint32_t highest_of(const uint32_t* magnitudes, int64_t n) {
    int32_t highest = 0;
    for (int64_t i = 0; i < n; ++i) highest = std::max(highest, static_cast<int32_t>(magnitudes[i]));
    return static_cast<uint32_t>(highest);
}

GOSSAMER_CLONES void to_magnitudes(const float* values, int64_t n, uint32_t* magnitudes) {
    for (int64_t i = 0; i < n; ++i) magnitudes[i] = magnitude_of(values[i]);
}

GOSSAMER_CLONES void add(const float* x, const float* before, float* after, int64_t n) {
    for (int64_t i = 0; i < n; ++i) after[i] = x[i] + before[i];
}

// A magnitude that between `rank` and `rank` + `more` of n numbers exceed, or the rank-th largest, which fewer do.
// All lie between low and high.
GOSSAMER_CLONES uint32_t exceeded(const uint32_t* magnitudes, int64_t n, int64_t rank, int64_t more, uint32_t low,
                                  uint32_t high) {
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int64_t found = count_above(magnitudes, n, middle);
        if (found < rank) {
            high = middle;
        } else if (found > rank + more) {
            low = middle + 1;
        } else {
            return middle;
        }
    }
    return low;
}

// As `exceeded` with more = 0, for many numbers, which are given as values; `magnitudes` has room for them.
uint32_t exceeded_by(const float* values, int64_t n, int64_t rank, uint32_t low, uint32_t high, uint32_t* magnitudes) {
    constexpr uint32_t kBins = 2048;
    to_magnitudes(values, n, magnitudes);
    while (n > 2 * kBins && high - low >= kBins) {
        int shift = 0;
        while (((high - low) >> shift) >= kBins) ++shift;
        uint32_t counts[kBins] = {};
        for (int64_t i = 0; i < n; ++i) ++counts[(magnitudes[i] - low) >> shift];
        uint32_t bin = kBins - 1;
        for (; counts[bin] < rank; --bin) rank -= counts[bin];
        low += bin << shift;
        high = std::min(high, low + ((1u << shift) - 1));
        int64_t kept = 0;
        for (int64_t i = 0, all = n; i < all; ++i) {
            const uint32_t magnitude = magnitudes[i];
            magnitudes[kept] = magnitude;
            kept += magnitude >= low && magnitude <= high;
        }
        n = kept;
    }
    return exceeded(magnitudes, n, rank, 0, low, high);
}

constexpr int64_t kRun = 16;  // neighbours share a cache line, and looking at them costs as much as at one

template <Sum kSum>
GOSSAMER_INLINE void take_run(const Span& span, int64_t start, uint32_t* sample) {
    for (int64_t j = 0; j < kRun; ++j) sample[j] = magnitude_of(wanted<kSum>(span, start + j));
}

// Magnitudes of `runs` times kRun entries. Runs are irregular, so that they do not all meet one column of a matrix.
GOSSAMER_CLONES void take_sample(const Span& span, int64_t stride, int64_t runs, uint32_t* sample) {
    const uint64_t places = static_cast<uint64_t>(stride - kRun + 1);
    for (int64_t run = 0; run < runs; ++run, sample += kRun) {
        const uint64_t noise = (static_cast<uint32_t>(run) * 0x9E3779B9u) >> 8;
        const int64_t start = run * stride + static_cast<int64_t>((noise * places) >> 24);
        switch (sum_of(span)) {
            case Sum::kAlone:
                take_run<Sum::kAlone>(span, start, sample);
                break;
            case Sum::kOwed:
                take_run<Sum::kOwed>(span, start, sample);
                break;
            case Sum::kMomentum:
                take_run<Sum::kMomentum>(span, start, sample);
                break;
            default:
                take_run<Sum::kNesterov>(span, start, sample);
                break;
        }
    }
}

// A magnitude that at least `rank` of a sample reach, and not many more.
GOSSAMER_CLONES uint32_t reached(const uint32_t* sample, int64_t n, int64_t rank) {
    const uint32_t high = highest_of(sample, n), low = high - std::min(high, 4u << 23);
    const bool wide = count_above(sample, n, low) < rank;  // more than a factor of 16 below the largest
    return exceeded(sample, n, rank, rank / 16, wide ? 0 : low, high);
}

// A threshold that somewhat more than `count` entries should reach; 0 where a sample would tell nothing. A wrong guess
// costs time, never the result.
uint32_t guess(const Span& span, int64_t count, uint32_t* sample) {
    const int64_t wished = std::min(std::max<int64_t>(span.size / 64, 128), Scratch::kSampled);
    const int64_t runs = std::min(wished, span.size / 4) / kRun;
    if (runs < 2) return 0;
    const int64_t sampled = runs * kRun;
    const double expected = static_cast<double>(count) * sampled / span.size;
    const int64_t rank = 3 + static_cast<int64_t>(expected + 3 * std::sqrt(expected));
    if (rank >= sampled) return 0;
    take_sample(span, span.size / runs, runs, sample);
    return reached(sample, sampled, rank);
}

// Drops all but the `count` largest of what was found, the first ones among equals, and gives the others back to
// `after`, where written. The rest goes to `places` and `values`. All magnitudes are `low` or above. Answers one that
// nothing that was dropped exceeds.
uint32_t keep_largest(const Span& span, Write write, int64_t count, uint32_t low, Found& found, uint32_t* magnitudes,
                      int32_t* places, float* values) {
    const int64_t all = found.count;
    if (all == count) {
        std::copy(found.places, found.places + all, places);
        std::copy(found.values, found.values + all, values);
        return low;
    }
    const uint32_t least = exceeded_by(found.values, all, count, low, found.highest, magnitudes);
    int64_t equal = count - count_values_above(found.values, all, least), kept = 0;
    for (int64_t begin = 0; begin < all; begin += Entries::kRoom) {
        const int64_t n = std::min(Entries::kRoom, all - begin);
        Entries keep, drop;
        partition(found.places + begin, found.values + begin, n, least, equal, keep, drop);
        std::memcpy(places + kept, keep.places, static_cast<size_t>(keep.count) * sizeof(int32_t));
        std::memcpy(values + kept, keep.values, static_cast<size_t>(keep.count) * sizeof(float));
        kept += keep.count;
        if (write == Write::kNothing) continue;
        for (int64_t i = 0; i < drop.count; ++i) {
            const int64_t at = drop.places[i] - span.place;
            span.after[at] = drop.values[i];
            if (span.u.masked) span.u.after[at] = accelerated(span, at);
        }
    }
    found.count = count;
    return least;
}

// The `count` largest of the entries of one tensor that are `floor` or above, or all of those: exact, whatever was
// guessed. Memory is passed once, unless the guess was too high; where it was too low, candidates are thinned out on the
// way, and none that comes later among equals counts.
int64_t largest_from(const Span& span, Write write, int64_t count, uint32_t floor, Scratch& scratch, int32_t* places,
                     float* values) {
    Found found{scratch.places.get(), scratch.values.get(), candidates(span.size, count)};
    uint32_t* magnitudes = scratch.magnitudes.get();
    uint32_t first = count ? std::max(floor, guess(span, count, magnitudes)) : kNever, low;
    for (;; first = floor) {
        uint32_t least = first;
        low = least ? least - 1 : 0;
        found.count = 0;
        for (int64_t i = 0; (i = scan(span, write, i, least, found)) < span.size;) {
            if (found.highest >= kInfinity) return kNotFinite;
            low = keep_largest(span, write, count, low, found, magnitudes, found.places, found.values);
            least = low + 1;
        }
        if (found.highest >= kInfinity) return kNotFinite;
        if (found.count >= count || first == floor) break;
    }
    const int64_t taken = std::min(found.count, count);
    if (taken) keep_largest(span, write, taken, low, found, magnitudes, places, values);
    return taken;
}

// The `count` largest entries of a small tensor. So many of kFew parts have a largest one that is not below `least`.
int64_t largest_of_small(const Span& span, Write write, int64_t count, Scratch& scratch, int32_t* places,
                         float* values) {
    float sums[kSmallTensor];
    Span written = span;
    if (write == Write::kNothing) written.after = sums;
    uint32_t tops[kFew];
    sum_up(written, tops);
    Found found{scratch.places.get(), scratch.values.get(), span.size};
    found.highest = *std::max_element(tops, tops + kFew);
    if (found.highest >= kInfinity) return kNotFinite;
    const uint32_t least = nth_top(tops, count);
    collect(written, least, found);
    if (found.count <= kFew) {
        keep_of_few(found, count, places, values);
    } else {
        keep_largest(span, Write::kNothing, count, least, found, scratch.magnitudes.get(), places, values);
    }
    for (int64_t i = 0; i < count && write != Write::kNothing; ++i) {
        span.after[places[i] - span.place] = 0.0f;
        if (span.u.masked) span.u.after[places[i] - span.place] = 0.0f;
    }
    return count;
}

int64_t largest_of(const Span& span, Write write, int64_t count, Scratch& scratch, int32_t* places, float* values) {
    const bool small = span.size <= kSmallTensor && 0 < count && count <= kFew / 2;
    return small ? largest_of_small(span, write, count, scratch, places, values)
                 : largest_from(span, write, count, 0, scratch, places, values);
}

// Where `before` is `after`, nothing is written until everything is known to be well: w is then computed again. What is
// written around the caches is written in whole vectors, whose places must be alike.
Write writing(const Span& span, int64_t n) {
    if (!span.before || span.before == span.after) return Write::kNothing;
    const uintptr_t unlike = reinterpret_cast<uintptr_t>(span.after) ^ reinterpret_cast<uintptr_t>(span.u.after);
    const bool large = n >= kStreamedBuffer && span.size >= kStreamedTensor;
    return large && (!span.u.after || unlike % 64 == 0) ? Write::kStreamed : Write::kCached;
}

void settle(const float* x, const float* before, float* after, int64_t n, const int32_t* places, int64_t count) {
    add(x, before, after, n);
    for (int64_t i = 0; i < count; ++i) after[places[i]] = 0.0f;
}

// Whether tensors of these sizes tile n elements.
bool tile(const int64_t* sizes, int64_t tensors, int64_t n) {
    int64_t total = 0;
    for (int64_t t = 0; t < tensors; ++t) {
        if (sizes[t] < 0 || sizes[t] > n - total) return false;
        total += sizes[t];
    }
    return total == n;
}

// The least magnitude, as bits, that is above a limit; NaN has none above it.
uint32_t least_above(float limit) {
    if (limit < 0) return 0;
    return limit >= 0 ? std::min(magnitude_of(limit) + 1, kNever) : kNever;
}

// `size` elements of a buffer from `place` on.
Span part(const Span& all, int64_t place, int64_t size) {
    const auto at = [&](auto* buffer) { return buffer ? buffer + place : nullptr; };
    const Momentum u{at(all.u.before), at(all.u.after), all.u.rate, all.u.nesterov, all.u.masked};
    return {at(all.x), at(all.before), at(all.after), size, static_cast<int32_t>(place), u};
}

// Of every tensor exactly as many as its count travel, so that it is known beforehand where they go.
int64_t largest_of_run(const Span& all, const int64_t* sizes, const int64_t* counts, Run run, int32_t* places,
                       float* values) {
    int64_t most = 0;
    for (int64_t t = run.first; t < run.end; ++t) {
        most = std::max({most, candidates(sizes[t], counts[t]), std::min(sizes[t], kSmallTensor)});
    }
    try {
        Scratch& scratch = scratch_for(most + kSlack);
        for (int64_t t = run.first; t < run.end; run.place += sizes[t++]) {
            const Span span = part(all, run.place, sizes[t]);
            const int64_t answer =
                largest_of(span, writing(span, all.size), counts[t], scratch, places + run.taken, values + run.taken);
            if (answer < 0) return answer;
            run.taken += answer;
        }
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kDone;
}

int64_t largest_of_each(const Span& all, const int64_t* sizes, const int64_t* counts, int64_t tensors, int32_t* places,
                        float* values) {
    if (!tile(sizes, tensors, all.size)) return kMisfit;
    int64_t taken = 0;
    for (int64_t t = 0; t < tensors; ++t) {
        if (counts[t] < 0 || counts[t] > sizes[t]) return kMisfit;
        taken += counts[t];
    }
    const int64_t fair = threads() == 1 ? all.size : all.size / (threads() * kPartsEach);
    const std::vector<Run> runs = runs_of(sizes, counts, tensors, std::max(fair, kLeastPart));
    const int64_t answer = shared(static_cast<int64_t>(runs.size()), [&](int64_t number) {
        return largest_of_run(all, sizes, counts, runs[static_cast<size_t>(number)], places, values);
    });
    if (answer < 0) return answer;
    if (all.before && all.before == all.after) settle(all.x, all.before, all.after, all.size, places, taken);
    return taken;
}

}  // namespace

Level level() {
#if GOSSAMER_X86
    static const Level best = __builtin_cpu_supports("avx512f") ? Level::kAvx512
                              : __builtin_cpu_supports("avx2")  ? Level::kAvx2
                                                                : Level::kPortable;
    return std::min(best, g_limit);
#else
    return std::min(Level::kPortable, g_limit);
#endif
}

}  // namespace gossamer

using namespace gossamer;

// Use no better instructions than 0 portable, 1 AVX2, 2 AVX-512, to compare them; answers the level in use.
GOSSAMER_EXPORT int64_t gossamer_limit_instructions(int64_t limit) {
    g_limit = static_cast<Level>(std::min<int64_t>(std::max<int64_t>(limit, 0), 2));
    return static_cast<int64_t>(level());
}

// x, before, after: n elements each; before and after: both or neither. places, values: room for the sum of counts.
GOSSAMER_EXPORT int64_t gossamer_largest(const float* x, const float* before, float* after, int64_t n,
                                         const int64_t* sizes, const int64_t* counts, int64_t tensors, int32_t* places,
                                         float* values) {
    return largest_of_each({x, before, after, n, 0, {}}, sizes, counts, tensors, places, values);
}

// The same of x with momentum `slow`, which becomes `fast`. No buffer is another one.
GOSSAMER_EXPORT int64_t gossamer_largest_with_momentum(const float* x, const float* slow, float* fast, float rate,
                                               int64_t nesterov, int64_t masked, const float* before, float* after,
                                               int64_t n, const int64_t* sizes, const int64_t* counts, int64_t tensors,
                                               int32_t* places, float* values) {
    if (n && (slow == fast || before == after)) return kMisfit;
    const Momentum u{slow, fast, rate, nesterov != 0, masked != 0};
    return largest_of_each({x, before, after, n, 0, u}, sizes, counts, tensors, places, values);
}

// The entries above `limit` in magnitude, or the `room` largest where more are. places, values: room for so many; zeros
// follow the values. Answers how many were found.
GOSSAMER_EXPORT int64_t gossamer_above(const float* x, const float* before, float* after, int64_t n, float limit,
                                       int64_t room, int32_t* places, float* values) {
    if (room < 0 || n < 0) return kMisfit;
    const Span span{x, before, after, n, 0, {}};
    int64_t found = 0;
    try {
        Scratch& scratch = scratch_for(candidates(n, room) + kSlack);
        found = largest_from(span, writing(span, n), room, least_above(limit), scratch, places, values);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    if (found < 0) return found;
    std::fill(values + found, values + room, 0.0f);
    if (before && before == after) settle(x, before, after, n, places, found);
    return found;
}
