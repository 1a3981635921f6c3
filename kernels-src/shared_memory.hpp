// Memory that two workers of one machine both see: slots that each of them fills with messages for the other.
//
// Only the header of such a message goes through the socket, with the number of its slot; so order, waking and the end of
// a peer are the socket's as ever. Slots are used in any order, the lowest first, which is the likeliest to be in a cache.
//
// A slot has a turn: 0, its sender may write; 1, its receiver may read. Why release and acquire suffice: only whose turn
// it is touches the bytes, and only that one changes the turn, so no two ever write the same place at a time. Whoever
// hands over stores the turn with release, after the last touch; the other loads it with acquire, before the first: all
// that was done to the bytes happens before what is done next. Nothing needs an order between slots.
//
// What a peer writes here may be anything: numbers of slots are checked, lengths are those that the receiver expects, and
// whoever maps the memory has made sure that it cannot shrink.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace gossamer {

constexpr int64_t kMessageBytes = int64_t{1} << 18;  // a slot's, too
constexpr int64_t kTurnsBytes = 4096;                // of the memory's beginning, in which the turns lie
constexpr int kMostSlots = 16;                       // so that one direction's turns share a line of the cache
constexpr int64_t kSharedFromBytes = int64_t{1} << 14;  // what is shorter goes along with its header

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "turns are seen by two processes");

constexpr int64_t shared_nbytes(int64_t slots) { return kTurnsBytes + 2 * slots * kMessageBytes; }

// One direction.
class Slots {
   public:
    Slots() = default;
    // memory: as long as shared_nbytes says; way: 0 for what the lower rank sends, 1 for the higher.
    Slots(char* memory, int count, int way)
        : turns_(reinterpret_cast<std::atomic<uint32_t>*>(memory) + way * kMostSlots),
          bytes_(memory + kTurnsBytes + way * count * kMessageBytes),
          count_(count) {}

    int count() const { return count_; }
    char* bytes(int slot) const { return bytes_ + slot * kMessageBytes; }

    // The sender's. A slot that may be written, or -1.
    int vacant() const {
        for (int slot = 0; slot < count_; slot++) {
            if (turns_[slot].load(std::memory_order_acquire) == 0) return slot;
        }
        return -1;
    }
    void fill(int slot, const char* from, int64_t length) {
        std::memcpy(bytes(slot), from, static_cast<size_t>(length));
        turns_[slot].store(1, std::memory_order_release);
    }

    // The receiver's. Whether a slot is there, and has been filled and not been held since.
    bool hold(int slot) {
        if (slot >= count_ || held_[slot] || turns_[slot].load(std::memory_order_acquire) != 1) return false;
        held_[slot] = true;
        held_count_++;
        return true;
    }
    int held() const { return held_count_; }
    void vacate(int slot) {
        held_[slot] = false;
        held_count_--;
        turns_[slot].store(0, std::memory_order_release);
    }

   private:
    std::atomic<uint32_t>* turns_ = nullptr;
    char* bytes_ = nullptr;
    int count_ = 0;
    bool held_[kMostSlots] = {};
    int held_count_ = 0;
};

}  // namespace gossamer
