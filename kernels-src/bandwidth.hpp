// Bandwidth limits of one machine: two token buckets, for sent and received bytes, in memory that all processes of a
// launcher map. No process holds a lock, so a killed process blocks no other one.
//
// Bytes have positions. The position `allowed` advances at the limit; `taken` advances with every transfer, and is at most
// `burst` behind `allowed`, so that an idle period grants no more than that. A connection transfers a part of at most
// `part` bytes, which gives it a ticket: the position behind its bytes. It may transfer again once `allowed` has reached
// its ticket. So all connections have their turns in order, in equal parts. With n connections, in any window of
// d seconds:
//
//     bytes <= rate d + burst + n part
//
// Only the launcher sets limits. Readers repeat a read during which the version changed. Times are nanoseconds of
// CLOCK_MONOTONIC, and are given, so that tests run in virtual time.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include <time.h>

namespace gossamer {

// Ethernet, IPv4, and TCP with timestamps, without VLAN tags, for each packet of at most kSegmentBytes.
constexpr int64_t kPacketHeaderBytes = 14 + 20 + 32;
constexpr int64_t kSegmentBytes = 1500 - 20 - 32;
constexpr int64_t kPacketsPerAcknowledgment = 2;  // RFC 5681, section 4.2
constexpr int64_t kMostPartBytes = 1 << 18;
constexpr double kPartSeconds = 0.005;
constexpr double kBurstSeconds = 0.05;  // longer than a process may wait for a core
constexpr int64_t kLeastWaitNanoseconds = 1000;  // -1 to -5 are answers of common.hpp
constexpr int64_t kMostWaitNanoseconds = 50000000;  // then a connection looks again: the limit may have changed
constexpr int64_t kNoCap = std::numeric_limits<int64_t>::max();

inline int64_t packets_of(int64_t payload) { return (payload + kSegmentBytes - 1) / kSegmentBytes; }
inline int64_t wire_bytes(int64_t payload) { return payload + packets_of(payload) * kPacketHeaderBytes; }
inline int64_t acknowledgment_bytes(int64_t payload) {
    return (packets_of(payload) + kPacketsPerAcknowledgment - 1) / kPacketsPerAcknowledgment * kPacketHeaderBytes;
}

inline int64_t monotonic_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

class Bucket {
   public:
    // rate: bytes per second; below 0 for no limit. By the launcher only.
    void set(double rate, int64_t now) {
        const Limit old = limit();
        const double burst = std::max(rate * kBurstSeconds, static_cast<double>(wire_bytes(kSegmentBytes)));
        // What was transferred in advance by the old limit is not owed by the new one, or a lower limit would stop all
        // connections for long. A limit after none begins without tokens.
        const double taken = static_cast<double>(taken_.load());
        const double base = old.rate < 0 ? taken : std::max(old.allowed(now), taken);
        version_.fetch_add(1);
        rate_.store(rate);
        base_.store(base);
        burst_.store(burst);
        since_.store(now);
        version_.fetch_add(1);
    }

    // Count bytes on the wire; the position behind them.
    int64_t take(int64_t bytes, int64_t now) {
        counted_.fetch_add(bytes, std::memory_order_relaxed);
        const Limit here = limit();
        if (here.rate < 0) return 0;
        const int64_t floor = static_cast<int64_t>(here.allowed(now) - here.burst);
        int64_t seen = taken_.load();
        int64_t next;
        do {
            next = std::max(seen, floor) + bytes;
        } while (!taken_.compare_exchange_weak(seen, next));
        return next;
    }

    // Bytes of payload that the holder of this ticket may transfer now; or, below 1, minus the nanoseconds to wait.
    int64_t room(int64_t ticket, int64_t now) const {
        const Limit here = limit();
        if (here.rate < 0) return kMostPartBytes;
        const double missing = static_cast<double>(ticket) - here.allowed(now);
        if (missing > 0) {
            const double wait = here.rate > 0 ? missing / here.rate * 1e9 : static_cast<double>(kMostWaitNanoseconds);
            const double least = static_cast<double>(kLeastWaitNanoseconds), most = static_cast<double>(kMostWaitNanoseconds);
            return -static_cast<int64_t>(std::clamp(wait, least, most));
        }
        const int64_t segments = static_cast<int64_t>(here.rate * kPartSeconds) / wire_bytes(kSegmentBytes);
        return std::clamp(segments * kSegmentBytes, kSegmentBytes, kMostPartBytes);
    }

    int64_t counted() const { return counted_.load(); }

   private:
    struct Limit {
        double rate, base, burst;
        int64_t since;
        double allowed(int64_t now) const { return base + static_cast<double>(now - since) * 1e-9 * std::max(rate, 0.0); }
    };

    Limit limit() const {
        for (;;) {
            const uint64_t before = version_.load();
            const Limit found{rate_.load(), base_.load(), burst_.load(), since_.load()};
            if (before % 2 == 0 && version_.load() == before) return found;
        }
    }

    std::atomic<uint64_t> version_;
    std::atomic<double> rate_, base_, burst_;
    std::atomic<int64_t> since_, taken_, counted_;
    int64_t padding_;
};
static_assert(sizeof(Bucket) == 64 && std::atomic<double>::is_always_lock_free, "processes share it as it is");

// The shared memory of kBandwidthBytes, zero at first: then every transfer waits until the launcher has set limits.
struct Bandwidth {
    Bucket up, down;
    std::atomic<int64_t> cap;  // on the counted bytes of both directions

    Bucket& bucket(int64_t way) { return way ? down : up; }
    int64_t room(int64_t way, int64_t ticket, int64_t now) {
        if (up.counted() + down.counted() >= cap.load()) return -kMostWaitNanoseconds;
        return bucket(way).room(ticket, now);
    }
    // A transfer of `payload` bytes by one call, with its headers, and the acknowledgments in the other direction.
    int64_t transfer(int64_t way, int64_t payload, int64_t now) {
        bucket(1 - way).take(acknowledgment_bytes(payload), now);
        return bucket(way).take(wire_bytes(payload), now);
    }
};
constexpr int64_t kBandwidthBytes = 4096;
static_assert(sizeof(Bandwidth) <= kBandwidthBytes, "it fits a page");

// One connection's use of it.
struct Meter {
    Bandwidth* shared = nullptr;  // null without limits, and between workers of one machine
    int64_t tickets[2] = {0, 0};

    explicit operator bool() const { return shared != nullptr; }
    int64_t room(int way) const { return shared->room(way, tickets[way], monotonic_nanoseconds()); }
    void transfer(int way, int64_t payload) { tickets[way] = shared->transfer(way, payload, monotonic_nanoseconds()); }
};
enum Way : int { kUp = 0, kDown = 1 };

}  // namespace gossamer
