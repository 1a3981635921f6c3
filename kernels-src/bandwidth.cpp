// The C interface of bandwidth.hpp, as comm/bandwidth calls it. memory: of kBandwidthBytes, shared by processes.

#include "bandwidth.hpp"

#include "common.hpp"

using namespace gossamer;

namespace {
Bandwidth& at(void* memory) { return *static_cast<Bandwidth*>(memory); }
}  // namespace

GOSSAMER_EXPORT int64_t gossamer_bandwidth_limit(void* memory, int64_t way, double bytes_per_second, int64_t now) {
    at(memory).bucket(way).set(bytes_per_second, now);
    return kDone;
}

// cap: of the counted bytes of both directions; below 0 for no cap.
GOSSAMER_EXPORT int64_t gossamer_bandwidth_cap(void* memory, int64_t cap) {
    at(memory).cap.store(cap < 0 ? kNoCap : cap);
    return kDone;
}

GOSSAMER_EXPORT int64_t gossamer_bandwidth_counted(void* memory, int64_t way) { return at(memory).bucket(way).counted(); }

GOSSAMER_EXPORT int64_t gossamer_bandwidth_room(void* memory, int64_t way, int64_t ticket, int64_t now) {
    return at(memory).room(way, ticket, now);
}

GOSSAMER_EXPORT int64_t gossamer_bandwidth_transfer(void* memory, int64_t way, int64_t payload, int64_t now) {
    return at(memory).transfer(way, payload, now);
}
