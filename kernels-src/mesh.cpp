// How the programs of mesh.hpp are moved on: what waits for what, and the sums. Bytes: mesh_links.cpp.

#include "mesh.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include <poll.h>

#include "common.hpp"
#include "mesh_sums.hpp"

namespace gossamer {
namespace {

constexpr size_t kSpares = 64;
constexpr long kNapNanoseconds = 100000;

}  // namespace

Mesh::Mesh(int rank, const int* sockets, int world) : rank_(rank), links_(static_cast<size_t>(world)) {
    for (int peer = 0; peer < world; peer++) links_[static_cast<size_t>(peer)].socket = sockets[peer];
}

void Mesh::share(int peer, char* memory, int slots) {
    Link& link = links_[static_cast<size_t>(peer)];
    link.out = Slots(memory, slots, rank_ < peer ? 0 : 1);
    link.in = Slots(memory, slots, rank_ < peer ? 1 : 0);
}

bool Mesh::seal(int peer, const CipherFunctions& functions, const unsigned char* sends, const unsigned char* hears) {
    Link& link = links_[static_cast<size_t>(peer)];
    link.sealed = Buffer(static_cast<size_t>(link.header_bytes() + kTagBytes + kMessageBytes + kTagBytes));
    return link.seals.start(functions, sends, true) && link.opens.start(functions, hears, false);
}

int64_t Mesh::begin(const Row* rows, int64_t row_count, void* const* places, const void* const* sources,
                    const int64_t* sizes, int64_t piece_count, int32_t format, double divisor, uint32_t form) {
    programs_.push_back(std::make_unique<Program>(rows, row_count, places, sources, sizes, piece_count, links_.size()));
    Program& here = *programs_.back();
    here.word = next_;
    here.form = form;
    here.format = format;
    here.divisor = divisor;
    // The first messages of everything before the second ones: what depends on them can begin.
    for (int64_t message = 0, most = here.most_messages(); message < most; message++) {
        for (const Row& row : here.rows) {
            if (row.does != kSend || row.stage != 0 || message >= here.piece_of(row).messages()) continue;
            const int32_t number = static_cast<int32_t>(&row - here.rows.data());
            links_[static_cast<size_t>(row.peer)].ready.push_back({&here, number, message});
        }
    }
    for (Link& link : links_) {
        if (link.socket >= 0 && !link.gone && !link.ready.empty()) send(link);
    }
    return next_++;
}

Ending Mesh::wait(uint32_t word, int milliseconds, int32_t* peer, int32_t* error) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::milliseconds(milliseconds);
    Program* wanted = find(word);
    if (wanted == nullptr) return kUnknown;
    for (;;) {
        bool moved = false;
        for (size_t i = 0; i < links_.size(); i++) {
            Link& link = links_[i];
            if (link.socket < 0 || link.gone) continue;
            moved |= send(link);
            if (!link.gone) moved |= hear(link, static_cast<int>(i));
            if (mismatch_ >= 0) {
                *peer = mismatch_;
                return kMismatch;
            }
        }
        if (wanted->finished()) {
            programs_.erase(std::find_if(programs_.begin(), programs_.end(), [&](auto& one) { return one.get() == wanted; }));
            return kFinished;
        }
        if (blocked(peer, error)) return kGone;
        if (const int other = ahead(*wanted); other >= 0) {
            *peer = other;
            return kMismatch;
        }
        // Upwards: of one millisecond there would be nothing left at once, and whoever asks again would never sleep.
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
        if (left <= 0) return kNotYet;
        if (!moved && !rest(static_cast<int>(left))) return kNotYet;
    }
}

Program* Mesh::find(uint32_t word) {
    for (auto& program : programs_) {
        if (program->word == word) return program.get();
    }
    return nullptr;
}

// Whether somebody is gone whom a program needs. Named is who went first: others leave because of that one.
bool Mesh::blocked(int32_t* peer, int32_t* error) const {
    for (size_t i = 0; i < links_.size(); i++) {
        const Link& link = links_[i];
        if (!link.gone) continue;
        bool needed = !link.ready.empty();
        for (const auto& program : programs_) needed |= program->awaited[i] > 0;
        if (!needed) continue;
        *peer = static_cast<int32_t>(first_gone_ - links_.data());
        *error = first_gone_->gone;
        return true;
    }
    return false;
}

// Who says a word that was not begun here before it has said all of this one, or -1. Whoever keeps to the same order has
// waited for this word before, and so has sent all of it: this one never will.
int Mesh::ahead(const Program& wanted) const {
    for (size_t i = 0; i < links_.size(); i++) {
        if (links_[i].early && wanted.awaited[i] > 0) return static_cast<int>(i);
    }
    return -1;
}

// Sums are made before they are told, and from what comes at an early stage before a later one: whoever owes the first of
// what is missing may be who keeps all others waiting. Where nothing is missing, it is who takes nothing.
Ending Mesh::waits_for(uint32_t word, int64_t* moved, int32_t* next) {
    const Program* program = find(word);
    if (program == nullptr) return kUnknown;
    for (size_t i = 0; i < links_.size(); i++) {
        const auto& ready = links_[i].ready;
        const bool owed = std::any_of(ready.begin(), ready.end(), [&](auto& each) { return each.program == program; });
        moved[i] = program->awaited[i] > 0 || owed ? links_[i].moved : -1;
        next[i] = moved[i] >= 0;
    }
    std::pair<int32_t, int32_t> first{INT32_MAX, 0};
    for (int32_t i = 0; i < static_cast<int32_t>(program->rows.size()); i++) {
        const Row& row = program->rows[static_cast<size_t>(i)];
        if (row.does == kSend || !missing(*program, i)) continue;
        const std::pair<int32_t, int32_t> place{row.does, row.stage};
        if (place < first) std::fill_n(next, links_.size(), 0);
        first = std::min(first, place);
        if (place == first) next[row.peer] = 1;
    }
    return kNotYet;
}

// Whether a row that takes something has not all of it.
bool Mesh::missing(const Program& program, int32_t number) const {
    const std::vector<bool>& came = program.came[static_cast<size_t>(number)];
    const Link& link = links_[static_cast<size_t>(program.rows[static_cast<size_t>(number)].peer)];
    const bool comes = link.hearing == &program && link.row == number;
    return comes || std::find(came.begin(), came.end(), false) != came.end();
}

// Slots are for what is on its way: where others' parts are late, what has come is put aside.
void Mesh::make_room(Link& link, Piece& piece) {
    for (Piece::Early& each : piece.early) {
        if (&links_[static_cast<size_t>(each.peer)] != &link || each.slot < 0) continue;
        each.buffer = room();
        std::memcpy(each.buffer.bytes.get(), link.in.bytes(each.slot), static_cast<size_t>(piece.length(each.message)));
        link.in.vacate(std::exchange(each.slot, -1));
        return;
    }
}

// Add up what is here for the message's present stage, once all of it is: by rank, so that the sum is always the same.
void Mesh::add(Program& program, int32_t number, int64_t message) {
    Piece& piece = program.pieces[static_cast<size_t>(number)];
    for (;;) {
        const int32_t stage = piece.done[static_cast<size_t>(message)];
        const int32_t adders = piece.stages[static_cast<size_t>(stage)].adders;
        if (adders == 0) return;
        std::vector<std::pair<int32_t, const void*>> here{{rank_, piece.place_after(message, stage)}};
        for (const Piece::Early& each : piece.early) {
            if (each.message != message || each.stage != stage) continue;
            const Slots& slots = links_[static_cast<size_t>(each.peer)].in;
            here.push_back({each.peer, each.slot < 0 ? each.buffer.bytes.get() : slots.bytes(each.slot)});
        }
        if (static_cast<int32_t>(here.size()) <= adders) return;
        std::sort(here.begin(), here.end());
        std::vector<const void*> terms;
        for (const auto& [peer, term] : here) terms.push_back(term);
        const int64_t n = piece.length(message) / itemsize_of(program.format);
        const double divisor = piece.ends_at(stage) ? program.divisor : 1.0;
        add_up_any(program.format, terms.data(), static_cast<int64_t>(terms.size()), n, divisor, piece.place(message));
        std::vector<Piece::Early> others;
        for (Piece::Early& each : piece.early) {
            if (each.message != message || each.stage != stage) {
                others.push_back(std::move(each));
            } else {
                give_back(each);
            }
        }
        piece.early = std::move(others);
        step(program, number, message);
    }
}

// The message's memory has gone through one more stage: send what waited for that.
void Mesh::step(Program& program, int32_t number, int64_t message) {
    Piece& piece = program.pieces[static_cast<size_t>(number)];
    const int32_t done = ++piece.done[static_cast<size_t>(message)];
    for (const int32_t row : piece.stages[static_cast<size_t>(done)].sends) {
        Link& link = links_[static_cast<size_t>(program.rows[static_cast<size_t>(row)].peer)];
        link.ready.push_back({&program, row, message});
    }
}

// Sleep until a socket can take or give something, or it is time to look for a slot again. False where a signal came.
bool Mesh::rest(int milliseconds) {
    std::vector<pollfd> sockets;
    int64_t sleep = milliseconds * 1000000LL;
    const auto may = [&sleep](const Link& link, Way way) {
        const int64_t room = link.meter ? link.meter.room(way) : 1;
        if (room <= 0) sleep = std::min(sleep, -room);
        return room > 0;
    };
    for (Link& link : links_) {
        if (link.socket < 0 || link.gone) continue;
        const bool wants_slot = !link.ready.empty() && !link.begun;  // or it would have been handed over
        link.naps += wants_slot;
        if (wants_slot) sleep = std::min<int64_t>(sleep, kNapNanoseconds);
        const int events = (!link.early && may(link, kDown) ? POLLIN : 0) | (link.begun && may(link, kUp) ? POLLOUT : 0);
        if (events) sockets.push_back({link.socket, static_cast<short>(events), 0});
    }
    const nfds_t count = static_cast<nfds_t>(sockets.size());
#ifdef __linux__
    const timespec timeout{sleep / 1000000000L, sleep % 1000000000L};
    return ppoll(sockets.data(), count, &timeout, nullptr) >= 0 || errno != EINTR;
#else
    return poll(sockets.data(), count, static_cast<int>((sleep + 999999) / 1000000)) >= 0 || errno != EINTR;
#endif
}

Buffer Mesh::room() {
    if (spare_.empty()) return Buffer(static_cast<size_t>(kMessageBytes));
    Buffer found = std::move(spare_.back());
    spare_.pop_back();
    return found;
}

void Mesh::give_back(Piece::Early& early) {
    if (early.slot >= 0) {
        links_[static_cast<size_t>(early.peer)].in.vacate(early.slot);
    } else if (spare_.size() < kSpares) {
        spare_.push_back(std::move(early.buffer));
    }
}

}  // namespace gossamer
