// One call's work, cut where blocks end, so that several threads share it. Blocks know nothing of each other, so that
// neither where it was cut nor who did which part shows in a single bit.

#pragma once

#include "segments.hpp"
#include "thread_pool.hpp"

#include <algorithm>
#include <vector>

namespace gossamer {

constexpr int64_t kLeastPart = int64_t{1} << 16;  // entries; waking a thread costs as much as encoding a few thousand
constexpr int64_t kPartsEach = 4;                 // so that one thread that gets no core holds up little

// Parts of so many entries or somewhat more, in order.
inline std::vector<Part> parts_of(const Spans& whole, int64_t least) {
    std::vector<Part> found;
    Part now;
    int64_t place = 0, index = 0;
    for (int64_t t = 0; t < whole.tensors; t++) {
        for (int64_t at = 0; at < whole.sizes[t];) {
            const int64_t left = whole.sizes[t] - at, missing = now.place + least - place;
            const int64_t blocks = (smaller(missing, left) + whole.block - 1) / whole.block;
            const int64_t n = smaller(blocks * whole.block, left);
            at += n;
            place += n;
            index += blocks;
            if (place - now.place < least) continue;
            now.end = place;
            found.push_back(now);
            now = Part{t, at, place, place, index};
        }
    }
    now.end = place;
    if (place > now.place) found.push_back(now);
    return found;
}

// A run of whole tensors: what one thread works on at a time.
struct Run {
    int64_t first, end;  // tensors
    int64_t place;       // where the first begins in the buffer
    int64_t taken;       // how many entries of those before it travel
};

// Runs of at least so many elements.
inline std::vector<Run> runs_of(const int64_t* sizes, const int64_t* counts, int64_t tensors, int64_t least) {
    std::vector<Run> found;
    Run now{};
    int64_t place = 0, taken = 0;
    for (int64_t t = 0; t < tensors; t++) {
        place += sizes[t];
        taken += counts[t];
        if (place - now.place < least && t + 1 < tensors) continue;
        now.end = t + 1;
        found.push_back(now);
        now = {t + 1, 0, place, taken};
    }
    return found;
}

// work(0) to work(count - 1), on several threads; the first answer in order that is not kDone.
template <typename Work>
int64_t shared(int64_t count, Work work) {
    struct Shared {
        Work& work;
        std::vector<int64_t> answers;
    } all{work, std::vector<int64_t>(static_cast<size_t>(count), kDone)};
    const auto one = [](void* what, int64_t part) {
        Shared& all = *static_cast<Shared*>(what);
        all.answers[static_cast<size_t>(part)] = all.work(part);
    };
    run_shared(count, one, &all);
    const auto bad = std::find_if(all.answers.begin(), all.answers.end(), [](int64_t answer) { return answer != kDone; });
    return bad == all.answers.end() ? kDone : *bad;
}

// work(spans) for parts that make up the whole, or for the whole where that is not worth several threads.
template <typename Work>
int64_t in_parts(const Spans& whole, Work work) {
    const int64_t total = whole.total();
    if (threads() == 1 || total < 2 * kLeastPart) return work(whole);
    const int64_t fair = total / (threads() * kPartsEach) + 1;
    const std::vector<Part> parts = parts_of(whole, std::max(fair, kLeastPart));
    return shared(static_cast<int64_t>(parts.size()), [&](int64_t number) {
        Spans some = whole;
        some.part = parts[static_cast<size_t>(number)];
        return work(some);
    });
}

}  // namespace gossamer
