// Random bytes for the functions of crc.cpp, polyval.cpp and bandwidth.cpp; part of sanitize.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "bandwidth.hpp"
#include "common.hpp"

extern "C" {
int64_t gossamer_limit_instructions(int64_t limit);
int64_t gossamer_crc32(const uint8_t*, int64_t, int64_t);
int64_t gossamer_polyval_powers(const uint8_t*, uint8_t*);
int64_t gossamer_polyval_update(const uint8_t*, void*, const uint8_t*, int64_t);
int64_t gossamer_polyval_digest(const uint8_t*, const void*, uint8_t*);
int64_t gossamer_bandwidth_limit(void*, int64_t, double, int64_t);
int64_t gossamer_bandwidth_cap(void*, int64_t);
int64_t gossamer_bandwidth_counted(void*, int64_t);
int64_t gossamer_bandwidth_room(void*, int64_t, int64_t, int64_t);
int64_t gossamer_bandwidth_transfer(void*, int64_t, int64_t, int64_t);
}

namespace gossamer_sanitize {

using Octets = std::vector<uint8_t>;

inline void bytes_must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_bytes: %s\n", what);
    std::abort();
}

inline Octets octets(std::mt19937& random, size_t n) {
    Octets found(n);
    for (uint8_t& each : found) each = static_cast<uint8_t>(random());
    return found;
}

// Parts of random lengths, each in a buffer of its own.
inline std::vector<Octets> cut(std::mt19937& random, const Octets& whole) {
    std::vector<Octets> parts;
    for (size_t at = 0; at < whole.size();) {
        const size_t length = std::min<size_t>(whole.size() - at, 1 + random() % (random() % 2 ? 20 : 2000));
        parts.emplace_back(whole.begin() + static_cast<int64_t>(at), whole.begin() + static_cast<int64_t>(at + length));
        at += length;
    }
    return parts;
}

// The definition, a bit at a time.
inline int64_t crc_by_bits(const Octets& bytes) {
    uint32_t r = 0xffffffffu;
    for (const uint8_t byte : bytes) {
        r ^= byte;
        for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ (r & 1 ? 0xedb88320u : 0);
    }
    return static_cast<uint32_t>(~r);
}

inline void crc(std::mt19937& random, const Octets& whole) {
    int64_t found = 0;
    for (const Octets& part : cut(random, whole)) {
        found = gossamer_crc32(part.data(), static_cast<int64_t>(part.size()), found);
    }
    bytes_must(found == crc_by_bits(whole), "a CRC-32 is wrong");
}

inline Octets polyval(const Octets& point, const std::vector<Octets>& parts) {
    Octets powers(512), hash(16);
    std::vector<uint64_t> running(5);
    bytes_must(gossamer_polyval_powers(point.data(), powers.data()) == gossamer::kDone, "no powers");
    for (const Octets& part : parts) {
        gossamer_polyval_update(powers.data(), running.data(), part.data(), static_cast<int64_t>(part.size()));
    }
    gossamer_polyval_digest(powers.data(), running.data(), hash.data());
    return hash;
}

// One hash for all ways to cut the bytes, and a linear one: the hash of a sum is the sum of the hashes.
inline void polyvals(std::mt19937& random, const Octets& whole) {
    const Octets point = octets(random, 16), other = octets(random, whole.size());
    Octets powers(512);
    if (gossamer_polyval_powers(point.data(), powers.data()) == gossamer::kMisfit) return;  // this processor has none
    const Octets first = polyval(point, {whole}), second = polyval(point, cut(random, other));
    bytes_must(polyval(point, cut(random, whole)) == first, "a hash depends on where its bytes are cut");
    Octets sum = whole, sum_of_hashes = first;
    for (size_t i = 0; i < sum.size(); i++) sum[i] ^= other[i];
    for (size_t i = 0; i < sum_of_hashes.size(); i++) sum_of_hashes[i] ^= second[i];
    bytes_must(polyval(point, {sum}) == sum_of_hashes, "a hash is not linear");
}

// A connection transfers as much as it may, in virtual time: no more than the law of bandwidth.hpp.
inline void bandwidth(std::mt19937& random) {
    using namespace gossamer;
    std::vector<uint64_t> memory(kBandwidthBytes / sizeof(uint64_t));
    const double rate = 1e4 * static_cast<double>(1 + random() % 100000);
    const int64_t begin = static_cast<int64_t>(random()) << 8;
    int64_t now = begin, ticket = 0, sent = 0, acknowledged = 0, part = 0;
    bytes_must(gossamer_bandwidth_room(memory.data(), 0, 0, now) < 0, "a transfer begins before there is a limit");
    bytes_must(gossamer_bandwidth_cap(memory.data(), -1) == kDone, "no cap is refused");
    for (const int64_t way : {0, 1}) gossamer_bandwidth_limit(memory.data(), way, way ? -1.0 : rate, now);
    for (int turn = 0; turn < 200; turn++) {
        const int64_t room = gossamer_bandwidth_room(memory.data(), 0, ticket, now);
        if (room <= 0) {
            now -= room;
            continue;
        }
        const int64_t payload = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(room));
        ticket = gossamer_bandwidth_transfer(memory.data(), 0, payload, now);
        sent += wire_bytes(payload);
        acknowledged += acknowledgment_bytes(payload);
        part = std::max(part, wire_bytes(room));
    }
    const double burst = std::max(rate * kBurstSeconds, static_cast<double>(wire_bytes(kSegmentBytes)));
    const double most = rate * static_cast<double>(now - begin) * 1e-9 + burst + static_cast<double>(part);
    bytes_must(sent > 0 && static_cast<double>(sent) <= most + 1.0, "a limit is exceeded");
    bytes_must(gossamer_bandwidth_counted(memory.data(), 0) == sent, "sent bytes are not counted");
    bytes_must(gossamer_bandwidth_counted(memory.data(), 1) == acknowledged, "acknowledgments are not counted");
    gossamer_bandwidth_cap(memory.data(), sent);
    bytes_must(gossamer_bandwidth_room(memory.data(), 1, 0, now) < 0, "a cap is exceeded");
}

}  // namespace gossamer_sanitize

inline void sanitize_bytes(int64_t share) {
    using namespace gossamer_sanitize;
    std::mt19937 random(7);
    const size_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 5000};
    for (int64_t level = 0; level < 3; level++) {
        gossamer_limit_instructions(level);
        for (int64_t round = 0; round < 40 / share; round++) {
            for (const size_t n : sizes) {
                crc(random, octets(random, n));
                polyvals(random, octets(random, n));
            }
        }
    }
    for (int64_t round = 0; round < 100 / share; round++) bandwidth(random);
}
