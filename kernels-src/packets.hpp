// Packets, where they are kept, and what they pass: lines and paths.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace gossamer {

using Nanoseconds = int64_t;

// What precedes every packet on a device with IFF_VNET_HDR; <linux/virtio_net.h> is no C++
struct OffloadHeader {
    uint8_t flags, kind;  // kind 0: a plain packet
    uint16_t header_bytes, segment_bytes, checksum_start, checksum_offset;
};
constexpr size_t kHeaderBytes = sizeof(OffloadHeader);
static_assert(kHeaderBytes == 10);
constexpr size_t kLargestBytes = kHeaderBytes + 65536;
constexpr size_t kSmallBytes = 2048;

struct Packet {
    uint32_t stored_bytes;  // with the offload header
    uint32_t wire_bytes;    // IP bytes once cut into segments
    uint16_t from, to;
    bool small;
    Nanoseconds delay;     // its own, jitter included
    Nanoseconds last_bit;  // when its last bit reaches the line that it comes to next
    unsigned char data[1];
};

// Buffers of two sizes that are used again, the last one first: its memory is still in the cache.
class Pool {
  public:
    Packet* take(size_t bytes) {
        auto& free = bytes <= kSmallBytes ? small_ : large_;
        if (free.empty()) return make(bytes <= kSmallBytes);
        Packet* packet = free.back();
        free.pop_back();
        return packet;
    }
    void give(Packet* packet) { (packet->small ? small_ : large_).push_back(packet); }

  private:
    Packet* make(bool small) {
        // Not make_unique, which would write to all of it: memory that no packet reaches is never taken
        std::unique_ptr<unsigned char[]> block(new unsigned char[sizeof(Packet) + (small ? kSmallBytes : kLargestBytes)]);
        auto* packet = reinterpret_cast<Packet*>(block.get());
        packet->small = small;
        owned_.push_back(std::move(block));
        return packet;
    }
    std::vector<Packet*> small_, large_;
    std::vector<std::unique_ptr<unsigned char[]>> owned_;
};

struct Line {
    double nanoseconds_per_byte = 0;
    Nanoseconds free_at = 0;
    double queue_bytes = 0;

    Nanoseconds takes(uint32_t bytes) const { return static_cast<Nanoseconds>(bytes * nanoseconds_per_byte); }
    bool is_full(Nanoseconds at) const {
        return static_cast<double>(free_at - at) > queue_bytes * nanoseconds_per_byte;
    }
    void set_rate(double bits_per_second) { nanoseconds_per_byte = 8e9 / bits_per_second; }
};

struct Host {
    std::string space;
    Line up, down;
    int device = -1;
};

constexpr size_t kUnshared = ~size_t{0};

// One direction between two hosts, and the number of the line that it shares with others, if any. Loss and jitter draw
// from generators of their own, so that the n-th packet of a pair has the same fate in every run.
struct Path {
    Nanoseconds delay = 0;
    double jitter_nanoseconds = 0, loss = 0;
    bool is_cut = false;
    size_t shared = kUnshared;
    Nanoseconds last_arrival = 0;
    std::mt19937_64 lots, swings;
};

enum class Stage : uint8_t { kShares, kArrives, kDelivered };

struct Event {
    Nanoseconds at;
    uint64_t order;
    Packet* packet;
    Stage stage;
    bool operator<(const Event& other) const {  // the top of a priority queue is the largest
        return at != other.at ? at > other.at : order > other.order;
    }
};

struct Counts {
    uint64_t packets = 0, bytes = 0, full = 0, lost = 0, cut = 0;
    double late_seconds = 0;
};

inline uint32_t wire_bytes(const unsigned char* data, size_t stored) {
    OffloadHeader header;
    std::memcpy(&header, data, sizeof header);
    const unsigned char* ip = data + kHeaderBytes;
    const auto bytes = static_cast<uint32_t>(stored - kHeaderBytes);
    if (header.kind == 0 || header.segment_bytes == 0) return bytes;
    const uint32_t ip_header = (ip[0] & 15U) * 4U;
    const uint32_t headers = ip_header + (ip[9] == 6 ? (ip[ip_header + 12] >> 4) * 4U : 8U);
    if (bytes <= headers) return bytes;
    const uint32_t segments = (bytes - headers + header.segment_bytes - 1) / header.segment_bytes;
    return bytes + (segments - 1) * headers;
}

}  // namespace gossamer
