// Random valid and malformed input for every exported function, under the address and undefined-behaviour sanitizers:
// make sanitize. Buffers have exactly the size that was agreed, so that a step outside is noticed.

#include "common.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "sanitize_bytes.hpp"
#include "sanitize_float4.hpp"
#include "sanitize_hadamard.hpp"
#include "sanitize_half.hpp"
#include "sanitize_low_rank.hpp"
#include "sanitize_mesh.hpp"
#include "sanitize_quantize.hpp"
#include "sanitize_threads.hpp"

extern "C" {
int64_t gossamer_abi();
int64_t gossamer_limit_instructions(int64_t limit);
int64_t gossamer_largest(const float*, const float*, float*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t*,
                         float*);
int64_t gossamer_largest_with_momentum(const float*, const float*, float*, float, int64_t, int64_t, const float*, float*,
                                       int64_t, const int64_t*, const int64_t*, int64_t, int32_t*, float*);
int64_t gossamer_above(const float*, const float*, float*, int64_t, float, int64_t, int32_t*, float*);
int64_t gossamer_encode_places(const int32_t*, int64_t, int64_t, int64_t, int64_t, uint8_t*, int64_t);
int64_t gossamer_decode_places(const uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t*);
int64_t gossamer_scatter(const int32_t* const*, const float* const*, const int64_t*, int64_t, float*, int64_t, int64_t,
                         int64_t);
}

namespace {

using gossamer::magnitude_of;

std::mt19937 g_random(1);

int64_t below(int64_t n) { return static_cast<int64_t>(g_random() % static_cast<uint64_t>(n)); }

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize: %s\n", what);
    std::abort();
}

std::vector<float> numbers(int64_t n, int64_t kind) {
    std::normal_distribution<float> normal;
    std::vector<float> found(static_cast<size_t>(n));
    for (float& each : found) {
        each = normal(g_random);
        if (kind == 1) each = std::round(each);
        if (kind == 2) each = 0.0f;
        if (kind == 3) each *= 1e-40f;
        if (kind == 4) each = static_cast<float>(&each - found.data());
    }
    return found;
}

struct Tensors {
    std::vector<int64_t> sizes, counts;
    int64_t n = 0, taken = 0;
};

Tensors tensors() {
    static const int64_t kSizes[] = {0, 1, 15, 16, 33, 63, 64, 100, 1000, 2048, 2049, 40000};
    Tensors found;
    for (int64_t t = below(5); t >= 0; --t) {
        found.sizes.push_back(kSizes[below(12)]);
        found.counts.push_back(below(found.sizes.back() + 1) / (1 + 30 * below(3)));
        found.n += found.sizes.back();
        found.taken += found.counts.back();
    }
    return found;
}

// The largest by sorting: their places, ascending.
std::vector<int32_t> by_sorting(const std::vector<float>& w, const Tensors& all) {
    std::vector<int32_t> found;
    int64_t begin = 0;
    for (size_t t = 0; t < all.sizes.size(); begin += all.sizes[t++]) {
        std::vector<int32_t> order(static_cast<size_t>(all.sizes[t]));
        for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(begin) + static_cast<int32_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            return magnitude_of(w[static_cast<size_t>(a)]) > magnitude_of(w[static_cast<size_t>(b)]);
        });
        std::sort(order.begin(), order.begin() + all.counts[t]);
        found.insert(found.end(), order.begin(), order.begin() + all.counts[t]);
    }
    return found;
}

using Floats = std::vector<float>;

// Spoils one number now and then; answers whether it did.
bool spoil(Floats& x) {
    if (x.empty() || below(8)) return false;
    const float bad[] = {NAN, INFINITY, -INFINITY, -NAN};
    x[static_cast<size_t>(below(static_cast<int64_t>(x.size())))] = bad[below(4)];
    return true;
}

Floats sums(const Floats& a, const Floats& b, float rate = 1.0f) {
    Floats found = a;
    for (size_t i = 0; i < a.size(); ++i) found[i] += b[i] * rate;
    return found;
}

Floats with_zeros(Floats from, const std::vector<int32_t>& places) {
    for (const int32_t place : places) from[static_cast<size_t>(place)] = 0.0f;
    return from;
}

// Whether what was taken is what sorting takes, and zeros stand in its place.
void expect_largest(const Tensors& all, const Floats& w, int64_t answer, const std::vector<int32_t>& places,
                    const Floats& values, const Floats* after) {
    expect(answer == all.taken, "largest answers something else");
    expect(places == by_sorting(w, all), "largest took others");
    for (size_t i = 0; i < places.size(); ++i) {
        expect(values[i] == w[static_cast<size_t>(places[i])], "largest took other values");
    }
    expect(!after || *after == with_zeros(w, places), "what largest left is something else");
}

void sanitize_largest() {
    const Tensors all = tensors();
    Floats x = numbers(all.n, below(5)), before = numbers(all.n, below(5)), apart(x.size());
    const bool spoilt = spoil(x);
    const int64_t mode = below(3);  // nothing owed, apart, in place
    const Floats w = mode ? sums(x, before) : x;
    Floats& after = mode == 2 ? before : apart;
    std::vector<int32_t> places(static_cast<size_t>(all.taken));
    Floats values(places.size());
    const int64_t answer = gossamer_largest(
        x.data(), mode ? before.data() : nullptr, mode ? after.data() : nullptr, all.n, all.sizes.data(),
        all.counts.data(), static_cast<int64_t>(all.sizes.size()), places.data(), values.data());
    if (spoilt) return expect(answer == gossamer::kNotFinite, "largest took what is not finite");
    expect_largest(all, w, answer, places, values, mode ? &after : nullptr);
}

void sanitize_momentum() {
    const Tensors all = tensors();
    Floats x = numbers(all.n, below(5)), u = numbers(all.n, below(5)), before = numbers(all.n, below(5));
    Floats fast(x.size()), after(x.size());
    const bool spoilt = spoil(x), nesterov = below(2), masked = below(2);
    const float rate = 0.9f;
    const Floats moved = sums(x, u, rate), w = sums(nesterov ? sums(x, moved, rate) : moved, before);
    std::vector<int32_t> places(static_cast<size_t>(all.taken));
    Floats values(places.size());
    const int64_t answer = gossamer_largest_with_momentum(
        x.data(), u.data(), fast.data(), rate, nesterov, masked, before.data(), after.data(), all.n, all.sizes.data(),
        all.counts.data(), static_cast<int64_t>(all.sizes.size()), places.data(), values.data());
    if (spoilt) return expect(answer == gossamer::kNotFinite, "momentum took what is not finite");
    expect_largest(all, w, answer, places, values, &after);
    expect(fast == (masked ? with_zeros(moved, places) : moved), "momentum became something else");
}

void sanitize_above() {
    Tensors all = tensors();
    Floats x = numbers(all.n, below(5)), before = numbers(all.n, below(5)), apart(x.size());
    const bool spoilt = spoil(x);
    const int64_t mode = below(3), room = below(all.n + 2);
    const Floats w = mode ? sums(x, before) : x, kept = before;
    Floats& after = mode == 2 ? before : apart;
    const float limit = static_cast<float>(below(30)) / 10 - 0.1f;
    std::vector<int32_t> places(static_cast<size_t>(room));
    Floats values(places.size(), 7.0f);
    const int64_t answer = gossamer_above(x.data(), mode ? before.data() : nullptr, mode ? after.data() : nullptr,
                                          all.n, limit, room, places.data(), values.data());
    if (spoilt) {
        expect(answer == gossamer::kNotFinite, "above took what is not finite");
        return expect(mode != 2 || before == kept, "a residual in place was changed by a failure");
    }
    const int64_t passing = std::count_if(w.begin(), w.end(), [&](float v) { return std::fabs(v) > limit; });
    all.taken = std::min(passing, room);
    all.sizes = {all.n};
    all.counts = {all.taken};
    expect(std::count(values.begin() + std::min(all.taken, room), values.end(), 0.0f) == room - all.taken,
           "no zeros follow what is above");
    places.resize(static_cast<size_t>(all.taken));
    expect_largest(all, w, answer, places, values, mode ? &after : nullptr);
}

void sanitize_misfits() {
    const std::vector<float> x(10);
    const std::vector<std::vector<int64_t>> sizes = {{9}, {11}, {-1, 11}, {20, -10}, {INT64_MAX, 10}};
    for (const auto& each : sizes) {
        const std::vector<int64_t> counts(each.size(), 0);
        const int64_t tensors = static_cast<int64_t>(each.size());
        expect(gossamer_largest(x.data(), nullptr, nullptr, 10, each.data(), counts.data(), tensors, nullptr,
                                nullptr) == gossamer::kMisfit,
               "sizes that do not fit were accepted");
    }
    expect(gossamer_above(x.data(), nullptr, nullptr, 10, 0.0f, -1, nullptr, nullptr) == gossamer::kMisfit,
           "less than no room was accepted");
    const int64_t ten = 10, too_many[] = {-1, 11};
    for (const int64_t& count : too_many) {
        expect(gossamer_largest(x.data(), nullptr, nullptr, 10, &ten, &count, 1, nullptr, nullptr) == gossamer::kMisfit,
               "a count that does not fit was accepted");
    }
}

struct Code {
    int64_t n, room, low;
    std::vector<uint8_t> bytes;
};

Code room_for(int64_t n, int64_t room, int64_t low) {
    const int64_t bits = low < 0 ? n : room + (std::max<int64_t>(n - 1, 0) >> low);
    const int64_t lows = low < 0 ? 0 : (room * low + 7) / 8;
    return {n, room, low, std::vector<uint8_t>(static_cast<size_t>(lows + (bits + 7) / 8))};
}

void sanitize_places() {
    const int64_t n = 1 + below(below(2) ? 100 : 100000), low = below(18) - 1;
    std::vector<int32_t> places;
    for (int64_t place = below(n); place < n; place += 1 + below(1 + below(n))) {
        places.push_back(static_cast<int32_t>(place));
    }
    const int64_t count = static_cast<int64_t>(places.size());
    Code code = room_for(n, count + below(3), low);
    const int64_t coded_bytes = static_cast<int64_t>(code.bytes.size());
    expect(gossamer_encode_places(places.data(), count, n, code.room, low, code.bytes.data(), coded_bytes) == 0,
           "places could not be encoded");
    std::vector<int32_t> decoded(places.size());
    const auto decode = [&](int64_t size) {
        return gossamer_decode_places(code.bytes.data(), size, count, n, code.room, low, decoded.data());
    };
    expect(decode(coded_bytes) == 0 && decoded == places, "places came back as others");
    expect(decode(coded_bytes - 1) == gossamer::kMalformed, "a short code was accepted");
    // Sums over places that were accepted, whoever wrote them.
    for (int64_t spoilt = 0; spoilt < 4; ++spoilt) {
        if (spoilt) code.bytes[static_cast<size_t>(below(coded_bytes))] = static_cast<uint8_t>(g_random());
        if (decode(coded_bytes) != 0) continue;
        std::vector<float> values(decoded.size(), 1.0f), out(static_cast<size_t>(n), 7.0f);
        const int32_t* at[] = {decoded.data(), decoded.data()};
        const float* given[] = {values.data(), values.data()};
        const int64_t counts[] = {count, count}, onto = below(2);
        expect(gossamer_scatter(at, given, counts, 2, out.data(), n, 2, onto) == 0, "a sum failed");
        double sum = 0;
        for (const float each : out) sum += each;
        expect(sum == static_cast<double>(count + (onto ? 7 * n : 0)), "a sum is wrong");
    }
    for (int64_t spoilt = 0; spoilt < 4 && count; ++spoilt) {
        const int32_t bad[] = {-1, static_cast<int32_t>(n), INT32_MAX, INT32_MIN};
        std::vector<int32_t> others = places;
        others[static_cast<size_t>(below(count))] = bad[spoilt];
        expect(gossamer_encode_places(others.data(), count, n, code.room, low, code.bytes.data(), coded_bytes) ==
                   gossamer::kMalformed,
               "places outside were encoded");
    }
}

void sanitize_select(int64_t share) {
    for (int64_t level = 0; level < 3; ++level) {
        gossamer_limit_instructions(level);
        for (int64_t round = 0; round < 200 / share; ++round) {
            sanitize_largest();
            sanitize_momentum();
            sanitize_above();
        }
        sanitize_misfits();
    }
    for (int64_t round = 0; round < 3000 / share; ++round) sanitize_places();
}

}  // namespace

// One in `share` of the random rounds, at most one in 20: an emulator is slow. All by default.
int main(int count, char** arguments) {
    const int64_t share = count > 1 ? std::atoll(arguments[1]) : 1;
    expect(share >= 1 && share <= 20, "the share must be a number from 1 to 20");
    expect(gossamer_abi() > 0, "no version");
    const std::pair<const char*, void (*)(int64_t)> parts[] = {
        {"select", sanitize_select},     {"quantize", sanitize_quantize}, {"float4", sanitize_float4},
        {"halves", sanitize_halves},     {"bytes", sanitize_bytes},       {"low_rank", sanitize_low_rank},
        {"mesh", sanitize_mesh},         {"hadamard", [](int64_t) { sanitize_hadamard(); }},
        {"threads", [](int64_t) { gossamer_sanitize::sanitize_threads(); }},
    };
    for (const auto& [name, part] : parts) {
        const std::clock_t begin = std::clock();
        part(share);
        std::printf("sanitize: %-8s %6.1f s of CPU time\n", name, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
        std::fflush(stdout);
    }
    std::puts("sanitize: passed");
}
