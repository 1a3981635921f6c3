// Means between threads over socket pairs, sealed or not, with and without shared memory, and peers that send anything;
// part of sanitize.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include "common.hpp"
#include "mesh.hpp"
#include "sanitize_bytes.hpp"
#include "sanitize_toy_cipher.hpp"
#include "sums.hpp"

extern "C" {
void* gossamer_mesh_open(int64_t, const int32_t*, int64_t);
int64_t gossamer_mesh_close(void*);
int64_t gossamer_mesh_share(void*, int64_t, void*, int64_t);
int64_t gossamer_mesh_seal(void*, int64_t, void* const*, const void*, const void*);
int64_t gossamer_mesh_begin(void*, const int32_t*, int64_t, void* const*, const void* const*, const int64_t*, int64_t, int64_t,
                            double, int64_t);
int64_t gossamer_mesh_wait(void*, int64_t, int64_t, int32_t*, int32_t*);
int64_t gossamer_mesh_waits_for(void*, int64_t, int64_t*, int32_t*);
int64_t gossamer_mesh_limit(void*, int64_t, void*);
int64_t gossamer_mesh_seal_words(void*, int64_t, void*, int64_t);
int64_t gossamer_mesh_open_words(void*, int64_t, void*, int64_t);
int64_t gossamer_mesh_is_between_messages(void*, int64_t);
}

namespace gossamer_sanitize {

inline void mesh_must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "sanitize_mesh: %s\n", what);
    std::abort();
}

// Sockets [rank][peer] of a group.
inline std::vector<std::vector<int32_t>> connected(int32_t world) {
    std::vector<std::vector<int32_t>> found(static_cast<size_t>(world), std::vector<int32_t>(static_cast<size_t>(world), -1));
    for (int32_t a = 0; a < world; a++) {
        for (int32_t b = 0; b < a; b++) {
            int ends[2];
            mesh_must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "there are no sockets");
            found[static_cast<size_t>(a)][static_cast<size_t>(b)] = ends[0];
            found[static_cast<size_t>(b)][static_cast<size_t>(a)] = ends[1];
        }
    }
    return found;
}

// Memory that two ranks see, for so many slots each way.
class Shared {
   public:
    explicit Shared(int64_t slots) : nbytes_(slots ? gossamer::shared_nbytes(slots) : 0) {
        if (!slots) return;
        bytes_ = static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(nbytes_)));
        std::memset(bytes_, 0, gossamer::kTurnsBytes);
    }
    Shared(Shared&& other) : bytes_(std::exchange(other.bytes_, nullptr)), nbytes_(other.nbytes_) {}
    ~Shared() { std::free(bytes_); }
    char* bytes() const { return bytes_; }
    void give(void* mesh, int64_t peer) const {
        if (bytes_) mesh_must(gossamer_mesh_share(mesh, peer, bytes_, nbytes_) == gossamer::kDone, "memory was refused");
    }

   private:
    char* bytes_ = nullptr;
    int64_t nbytes_;
};

// The key of what one rank says to another.
inline std::vector<unsigned char> toy_key(int64_t from, int64_t to) {
    std::vector<unsigned char> key(gossamer::kKeyBytes, static_cast<unsigned char>(17 * from + to + 1));
    return key;
}

inline void toy_seal(void* mesh, int64_t rank, int64_t peer) {
    const auto sends = toy_key(rank, peer), hears = toy_key(peer, rank);
    mesh_must(gossamer_mesh_seal(mesh, peer, toy_functions().data(), sends.data(), hears.data()) == gossamer::kDone,
              "keys were refused");
}

// Every part straight to its owner, and from there to all.
inline std::vector<int32_t> direct(int32_t rank, int32_t world) {
    std::vector<int32_t> rows;
    const auto row = [&](int32_t does, int32_t peer, int32_t piece, int32_t stage, int32_t tag) {
        for (const int32_t each : {does, peer, piece, stage, tag}) rows.push_back(each);
    };
    for (int32_t peer = 0; peer < world; peer++) {
        if (peer == rank) continue;
        row(gossamer::kSend, peer, peer, 0, peer);
        row(gossamer::kAdd, peer, rank, 0, rank);
        row(gossamer::kSend, peer, rank, 1, world + rank);
        row(gossamer::kKeep, peer, peer, 0, world + peer);
    }
    return rows;
}

inline int64_t ended(void* mesh, int64_t word, int32_t world) {
    int32_t peer, error;
    int64_t answer;
    std::vector<int64_t> moved(static_cast<size_t>(world));
    std::vector<int32_t> next(static_cast<size_t>(world));
    while ((answer = gossamer_mesh_wait(mesh, word, 1, &peer, &error)) == gossamer::kNotYet) {
        gossamer_mesh_waits_for(mesh, word, moved.data(), next.data());
        mesh_must(std::count(next.begin(), next.end(), 1) > 0, "nobody is waited for");
    }
    return answer;
}

inline void means(int32_t world, int64_t numel, int repeats, int64_t slots, bool sealed) {
    const auto sockets = connected(world);
    std::vector<std::vector<Shared>> shared(static_cast<size_t>(world));  // by the higher rank and the lower one
    for (size_t a = 0; a < shared.size(); a++) {
        for (size_t b = 0; b < a; b++) shared[a].emplace_back(slots);
    }
    std::vector<std::thread> ranks;
    for (int32_t rank = 0; rank < world; rank++) {
        ranks.emplace_back([&, rank] {
            void* mesh = gossamer_mesh_open(rank, sockets[static_cast<size_t>(rank)].data(), world);
            for (int32_t peer = 0; peer < world; peer++) {
                if (peer == rank) continue;
                shared[static_cast<size_t>(std::max(rank, peer))][static_cast<size_t>(std::min(rank, peer))].give(mesh, peer);
                if (sealed) toy_seal(mesh, rank, peer);
            }
            const auto rows = direct(rank, world);
            // Every second one begins elsewhere, in what stays as it is; alone nothing moves, wherever it begins.
            const std::vector<float> given(static_cast<size_t>(numel), static_cast<float>(rank));
            std::vector<std::vector<float>> x(static_cast<size_t>(repeats));
            std::vector<int64_t> words;
            for (auto& each : x) {
                const bool apart = world > 1 && (&each - x.data()) % 2;
                each.assign(static_cast<size_t>(numel), apart ? -1.0f : static_cast<float>(rank));
                std::vector<void*> places;
                std::vector<const void*> sources;
                std::vector<int64_t> sizes;
                for (int64_t part = 0, at = 0; part < world; part++) {
                    const int64_t length = numel / world + (part < numel % world);
                    places.push_back(each.data() + at);
                    sources.push_back((apart ? given.data() : each.data()) + at);
                    sizes.push_back(4 * length);
                    at += length;
                }
                words.push_back(gossamer_mesh_begin(mesh, rows.data(), static_cast<int64_t>(rows.size()) / 5, places.data(),
                                                    sources.data(), sizes.data(), world, gossamer::kFloat32, world, 7));
            }
            for (size_t i = x.size(); i-- > 0;) {
                mesh_must(ended(mesh, words[i], world) == gossamer::kFinished, "a mean did not end");
                for (const float each : x[i]) mesh_must(each == (world - 1) / 2.0f, "a mean is none");
            }
            for (const float each : given) mesh_must(each == static_cast<float>(rank), "a mean was written over its source");
            gossamer_mesh_close(mesh);
        });
    }
    for (auto& rank : ranks) rank.join();
    for (const auto& each : sockets) {
        for (const int32_t socket : each) {
            if (socket >= 0) close(socket);
        }
    }
}

// What comes is no message of ours, or one of a word that nobody began: the mean never ends, and nothing is written where
// it should not be.
inline void anything(std::mt19937& random, bool sealed) {
    const auto sockets = connected(2);
    const int64_t slots = random() % 3;
    const Shared shared(slots);
    void* mesh = gossamer_mesh_open(0, sockets[0].data(), 2);
    shared.give(mesh, 1);
    if (sealed) toy_seal(mesh, 0, 1);
    for (size_t i = 0; slots && i < gossamer::kTurnsBytes; i++) shared.bytes()[i] = static_cast<char>(random() % 2);
    const auto rows = direct(0, 2);
    std::vector<float> x(200000);
    void* places[] = {x.data(), x.data() + 100000};
    const int64_t sizes[] = {400000, 400000};
    const int64_t word = gossamer_mesh_begin(mesh, rows.data(), static_cast<int64_t>(rows.size()) / 5, places, places, sizes,
                                             2, gossamer::kFloat32, 2.0, 7);
    std::vector<uint32_t> said(1 + random() % 64);
    for (uint32_t& each : said) each = random() % 3 ? random() % 4 : random();
    if (random() % 2) said[0] = 0;  // the word is right
    if (said.size() > 3 && random() % 2) said[1] = 7, said[2] = random() % 2 ? 0 : 3, said[3] = random() % 3 | random() % 4 << 26;
    if (sealed && random() % 2) toy_sealed(said, toy_key(1, 0));
    mesh_must(write(sockets[1][0], said.data(), 4 * said.size()) > 0, "nothing could be said");
    std::vector<char> sink(1 << 20);
    shutdown(sockets[1][0], SHUT_WR);
    while (recv(sockets[1][0], sink.data(), sink.size(), MSG_DONTWAIT) > 0) {}
    int32_t peer, error;
    for (int turn = 0; turn < 3; turn++) {
        const int64_t answer = gossamer_mesh_wait(mesh, word, 1, &peer, &error);
        mesh_must(answer != gossamer::kFinished, "nonsense was taken for an answer");
    }
    gossamer_mesh_close(mesh);
    close(sockets[0][1]);
    close(sockets[1][0]);
}

// What one of two sealed ranks says is changed in one place: the other never takes it, and its sum stays as it was.
inline void changed(std::mt19937& random) {
    const auto here = connected(2), there = connected(2);
    void* hears = gossamer_mesh_open(0, here[0].data(), 2);
    void* says = gossamer_mesh_open(1, there[1].data(), 2);
    toy_seal(hears, 0, 1);
    toy_seal(says, 1, 0);
    const int64_t n = 1 + random() % 10000;
    std::vector<float> x(static_cast<size_t>(n), 1.0f), y(static_cast<size_t>(n), 2.0f);
    void* const mine[] = {x.data()};
    void* const theirs[] = {y.data()};
    const int64_t sizes[] = {4 * n};
    const int32_t takes[] = {gossamer::kAdd, 1, 0, 0, 5}, tells[] = {gossamer::kSend, 0, 0, 0, 5};
    const int64_t word = gossamer_mesh_begin(hears, takes, 1, mine, mine, sizes, 1, gossamer::kFloat32, 1.0, 7);
    gossamer_mesh_begin(says, tells, 1, theirs, theirs, sizes, 1, gossamer::kFloat32, 1.0, 7);
    std::vector<char> said(sizeof(gossamer::Header) + static_cast<size_t>(4 * n) + 2 * gossamer::kTagBytes);
    mesh_must(recv(there[0][1], said.data(), said.size(), MSG_WAITALL) == static_cast<ssize_t>(said.size()), "too little");
    const bool whole = random() % 8 == 0;
    if (!whole) said[random() % said.size()] ^= static_cast<char>(1 << random() % 8);
    mesh_must(write(here[1][0], said.data(), said.size()) == static_cast<ssize_t>(said.size()), "nothing could be said");
    int32_t peer, error = 0;
    const int64_t answer = gossamer_mesh_wait(hears, word, 1000, &peer, &error);
    mesh_must(answer == (whole ? gossamer::kFinished : gossamer::kGone), "a change was not noticed");
    mesh_must(whole || (peer == 1 && error == gossamer::kChanged), "somebody else is said to be gone");
    for (const float each : x) mesh_must(each == (whole ? 3.0f : 1.0f), "what was changed was added");
    gossamer_mesh_close(hears);
    gossamer_mesh_close(says);
    for (const auto* all : {&here, &there}) {
        for (const auto& each : *all) {
            for (const int32_t socket : each) {
                if (socket >= 0) close(socket);
            }
        }
    }
}

// What a peer says lies in shared memory: a number that was filled, and others, once each and twice.
inline void slots(int64_t first, int64_t second, bool taken) {
    const auto sockets = connected(2);
    const Shared shared(2);
    void* mesh = gossamer_mesh_open(0, sockets[0].data(), 2);
    shared.give(mesh, 1);
    gossamer::Slots theirs(shared.bytes(), 2, 1);
    std::vector<float> x(1 << 17), y(1 << 17, 1.0f);  // two messages
    const int32_t rows[] = {gossamer::kAdd, 1, 0, 0, 0};
    void* places[] = {x.data()};
    const int64_t sizes[] = {1 << 19};
    const int64_t word = gossamer_mesh_begin(mesh, rows, 1, places, places, sizes, 1, gossamer::kFloat32, 1.0, 7);
    theirs.fill(0, reinterpret_cast<const char*>(y.data()), gossamer::kMessageBytes);
    const auto say = [&](uint32_t message, int64_t slot) {
        const gossamer::Header header{0, 7, 0, gossamer::Header::place_of(message, static_cast<int>(slot))};
        mesh_must(write(sockets[1][0], &header, sizeof header) == sizeof header, "nothing could be said");
    };
    say(0, first);
    say(1, second);
    int32_t peer, error;
    const int64_t answer = gossamer_mesh_wait(mesh, word, 1, &peer, &error);
    mesh_must(answer == gossamer::kMismatch && peer == 1, "a slot was read that is none or was not filled");
    mesh_must((x[0] == 1.0f) == taken, "a slot was not read, or another one was");
    mesh_must(gossamer_mesh_share(mesh, 1, shared.bytes(), 4096) == gossamer::kMisfit, "memory too short was taken");
    gossamer_mesh_close(mesh);
    close(sockets[0][1]);
    close(sockets[1][0]);
}

// Two sealed ranks, of which one sends by a limit, take leave: the words open once, and changed ones never.
inline void last_words() {
    const auto sockets = connected(2);
    void* hears = gossamer_mesh_open(0, sockets[0].data(), 2);
    void* says = gossamer_mesh_open(1, sockets[1].data(), 2);
    std::vector<uint64_t> memory(gossamer::kBandwidthBytes / sizeof(uint64_t));
    gossamer_bandwidth_cap(memory.data(), -1);
    for (const int64_t way : {0, 1}) gossamer_bandwidth_limit(memory.data(), way, 1e9, gossamer::monotonic_nanoseconds());
    gossamer_mesh_limit(says, 0, memory.data());
    std::vector<char> words(5 + gossamer::kTagBytes, 'a');
    mesh_must(gossamer_mesh_seal_words(says, 0, words.data(), 5) == gossamer::kMisfit, "words were sealed without keys");
    toy_seal(hears, 0, 1);
    toy_seal(says, 1, 0);
    std::vector<float> x(1000, 1.0f), y(1000, 2.0f);
    void* const mine[] = {x.data()};
    void* const theirs[] = {y.data()};
    const int64_t sizes[] = {4000};
    const int32_t takes[] = {gossamer::kAdd, 1, 0, 0, 5}, tells[] = {gossamer::kSend, 0, 0, 0, 5};
    const int64_t word = gossamer_mesh_begin(hears, takes, 1, mine, mine, sizes, 1, gossamer::kFloat32, 1.0, 7);
    const int64_t told = gossamer_mesh_begin(says, tells, 1, theirs, theirs, sizes, 1, gossamer::kFloat32, 1.0, 7);
    mesh_must(ended(says, told, 2) == gossamer::kFinished, "a part was not sent");
    mesh_must(ended(hears, word, 2) == gossamer::kFinished && x[999] == 3.0f, "a part did not arrive");
    mesh_must(gossamer_bandwidth_counted(memory.data(), 0) > 4000, "a limited connection counts nothing");
    mesh_must(gossamer_mesh_is_between_messages(says, 0) == 1, "a message is not whole");
    mesh_must(gossamer_mesh_seal_words(says, 0, words.data(), 5) == gossamer::kDone, "last words were not sealed");
    std::vector<char> again = words, spoilt = words;
    spoilt[2] ^= 1;
    mesh_must(gossamer_mesh_open_words(hears, 1, spoilt.data(), 5) == gossamer::kMisfit, "changed words were opened");
    mesh_must(gossamer_mesh_open_words(hears, 1, words.data(), 5) == gossamer::kDone, "last words did not open");
    mesh_must(std::count(words.begin(), words.begin() + 5, 'a') == 5, "last words became others");
    mesh_must(gossamer_mesh_seal_words(says, 0, again.data(), 5) == gossamer::kMisfit, "last words were sealed twice");
    gossamer_mesh_close(hears);
    gossamer_mesh_close(says);
    close(sockets[0][1]);
    close(sockets[1][0]);
}

// Word, form and tag are right: what is said after that, and that it is refused before anything is written.
inline void refused(int32_t does, int64_t messages, const std::vector<uint32_t>& said) {
    const auto sockets = connected(3);
    void* mesh = gossamer_mesh_open(0, sockets[0].data(), 3);
    std::vector<float> x(1 << 16);
    const int32_t rows[] = {does, 1, 0, 0, 5, does, 2, 0, 0, 5};
    void* places[] = {x.data()};
    const int64_t sizes[] = {messages * gossamer::kMessageBytes};
    const int64_t row_count = does == gossamer::kAdd ? 2 : 1;
    const int64_t word = gossamer_mesh_begin(mesh, rows, row_count, places, places, sizes, 1, gossamer::kFloat32, 1.0, 7);
    const std::vector<float> part(x.size(), 1.0f);
    for (const uint32_t message : said) {
        const gossamer::Header header{0, 7, 5, gossamer::Header::place_of(message, -1)};
        mesh_must(write(sockets[1][0], &header, sizeof header) == sizeof header, "nothing could be said");
        if (message >= messages) break;
        for (size_t at = 0; at < gossamer::kMessageBytes;) {  // in parts, since nobody reads beside this thread
            const ssize_t took = send(sockets[1][0], reinterpret_cast<const char*>(part.data()) + at,
                                      static_cast<size_t>(gossamer::kMessageBytes) - at, MSG_DONTWAIT);
            at += took > 0 ? static_cast<size_t>(took) : 0;
            int32_t peer, error;
            if (gossamer_mesh_wait(mesh, word, 1, &peer, &error) == gossamer::kMismatch) break;
        }
    }
    int32_t peer, error;
    const int64_t answer = gossamer_mesh_wait(mesh, word, 1, &peer, &error);
    mesh_must(answer == gossamer::kMismatch && peer == 1, "a message was taken that is none, or came before");
    for (const float each : x) mesh_must(each == 0.0f, "what was refused was written");
    gossamer_mesh_close(mesh);
    for (const auto& each : sockets) {
        for (const int32_t socket : each) {
            if (socket >= 0) close(socket);
        }
    }
}

}  // namespace gossamer_sanitize

inline void sanitize_mesh(int64_t share) {
    for (const int32_t world : {1, 2, 3, 5}) {
        for (const bool sealed : {false, true}) {
            for (const int64_t numel : {0, 1, 7, 1000, 300001}) gossamer_sanitize::means(world, numel, 3, 0, sealed);
            for (const int64_t slots : {1, 2, 7}) gossamer_sanitize::means(world, 300001, 3, slots, sealed);
        }
    }
    gossamer_sanitize::slots(1, 0, false);   // not filled
    gossamer_sanitize::slots(2, 0, false);   // beyond the memory
    gossamer_sanitize::slots(60, 0, false);
    gossamer_sanitize::slots(0, 0, true);    // read, and so not filled any more
    for (const uint32_t messages : {1u, 2u, 63u, 64u, 1000u}) {
        gossamer_sanitize::refused(gossamer::kKeep, messages, {messages});  // one beyond the last
        gossamer_sanitize::refused(gossamer::kAdd, messages, {messages});
    }
    gossamer_sanitize::refused(gossamer::kAdd, 1, {0, 0});  // one of two summands twice
    std::mt19937 random(5);
    for (int64_t round = 0; round < 4000 / share; round++) gossamer_sanitize::anything(random, round % 2 == 1);
    for (int64_t round = 0; round < 300 / share; round++) gossamer_sanitize::changed(random);
    gossamer_sanitize::last_words();
}
