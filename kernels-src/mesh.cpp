// How the programs of mesh.hpp are moved on.

#include "mesh.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "common.hpp"
#include "sums.hpp"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // where it does not exist the socket itself was told
#endif

namespace gossamer {
namespace {

constexpr int64_t kTurnBytes = 4 * kMessageBytes;  // taken from one peer before the others have their turn
constexpr size_t kSpares = 64;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

// -- sums, compiled for several instruction sets ----------------------------------------------------------------------

GOSSAMER_CLONES void add_up_float32(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Plain<float>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_float64(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Plain<double>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_bfloat16(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Narrow<Bfloat16, 0x7fc0>>(terms, count, n, divisor, out);
}

GOSSAMER_CLONES void add_up_float16(const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    add_up<Narrow<Float16, 0x7e00>>(terms, count, n, divisor, out);
}

static void add_up_any(int32_t format, const void* const* terms, int64_t count, int64_t n, double divisor, void* out) {
    switch (format) {
        case kFloat32: return add_up_float32(terms, count, n, divisor, out);
        case kFloat64: return add_up_float64(terms, count, n, divisor, out);
        case kBfloat16: return add_up_bfloat16(terms, count, n, divisor, out);
        case kFloat16: return add_up_float16(terms, count, n, divisor, out);
    }
}

Mesh::Mesh(int rank, const int* sockets, int world) : rank_(rank), links_(static_cast<size_t>(world)) {
    for (int peer = 0; peer < world; peer++) links_[static_cast<size_t>(peer)].socket = sockets[peer];
}

int64_t Mesh::begin(const Row* rows, int64_t row_count, void* const* places, const int64_t* sizes, int64_t piece_count,
                    int32_t format, double divisor, uint32_t form) {
    auto program = std::make_unique<Program>();
    program->word = next_;
    program->form = form;
    program->format = format;
    program->divisor = divisor;
    program->rows.assign(rows, rows + row_count);
    program->pieces.resize(static_cast<size_t>(piece_count));
    program->heard_by_tag.resize(links_.size());
    program->awaited.assign(links_.size(), 0);
    program->came.resize(static_cast<size_t>(row_count));
    int64_t longest = 0;
    for (size_t i = 0; i < program->pieces.size(); i++) {
        Piece& piece = program->pieces[i];
        piece.at = static_cast<char*>(places[i]);
        piece.nbytes = sizes[i];
        piece.stages.resize(1);
        piece.done.assign(static_cast<size_t>(piece.messages()), 0);
        longest = std::max(longest, piece.messages());
    }
    for (int32_t i = 0; i < static_cast<int32_t>(row_count); i++) {
        const Row& row = program->rows[static_cast<size_t>(i)];
        Piece& piece = program->pieces[static_cast<size_t>(row.piece)];
        const size_t needs = static_cast<size_t>(row.stage) + (row.does == kSend ? 1 : 2);
        if (piece.stages.size() < needs) piece.stages.resize(needs);
        Piece::Stage& stage = piece.stages[static_cast<size_t>(row.stage)];
        program->left += piece.messages();
        if (row.does == kSend) {
            stage.sends.push_back(i);
            continue;
        }
        if (row.does == kAdd) stage.adders++;
        program->came[static_cast<size_t>(i)].resize(static_cast<size_t>(piece.messages()));
        program->heard_by_tag[static_cast<size_t>(row.peer)][static_cast<uint32_t>(row.tag)] = i;
        program->awaited[static_cast<size_t>(row.peer)] += piece.messages();
    }
    // The first messages of everything before the second ones: what depends on them can begin.
    Program& here = *program;
    programs_.push_back(std::move(program));
    for (int64_t message = 0; message < longest; message++) {
        for (const Row& row : here.rows) {
            const Piece& piece = here.pieces[static_cast<size_t>(row.piece)];
            if (row.does != kSend || row.stage != 0 || message >= piece.messages()) continue;
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
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
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

// Hand over as much as the socket takes. Whether it took anything.
bool Mesh::send(Link& link) {
    bool moved = false;
    while (!link.ready.empty()) {
        const Link::Outgoing& next = link.ready.front();
        const Row& row = next.program->rows[static_cast<size_t>(next.row)];
        const Piece& piece = next.program->pieces[static_cast<size_t>(row.piece)];
        if (link.sent == 0) {
            link.saying = {next.program->word, next.program->form, static_cast<uint32_t>(row.tag),
                           static_cast<uint32_t>(next.message)};
        }
        const int64_t head = static_cast<int64_t>(sizeof(Header)), all = head + piece.length(next.message);
        iovec parts[2];
        int count = 0;
        if (link.sent < head) {
            parts[count++] = {reinterpret_cast<char*>(&link.saying) + link.sent, static_cast<size_t>(head - link.sent)};
        }
        const int64_t begun = std::max<int64_t>(0, link.sent - head);
        parts[count++] = {piece.place(next.message) + begun, static_cast<size_t>(all - head - begun)};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
        const ssize_t took = sendmsg(link.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (took < 0) {
            if (errno == EINTR) continue;
            if (!would_block(errno)) lose(link, errno);
            return moved;
        }
        moved = true;
        link.sent += took;
        if (link.sent < all) return moved;
        link.sent = 0;
        next.program->left--;
        link.ready.pop_front();
    }
    return moved;
}

// Take what has arrived, but leave the others their turn. Whether anything had.
bool Mesh::hear(Link& link, int peer) {
    if (link.early && !open(link, peer)) return false;
    bool moved = false;
    for (int64_t turn = kTurnBytes; turn > 0 && mismatch_ < 0;) {
        const bool header = link.hearing == nullptr;
        char* to = header ? reinterpret_cast<char*>(&link.heard) + link.heard_bytes : link.to;
        const int64_t wanted = header ? static_cast<int64_t>(sizeof(Header)) - link.heard_bytes : link.rest;
        const ssize_t came = recv(link.socket, to, static_cast<size_t>(wanted), MSG_DONTWAIT);
        if (came < 0 && errno == EINTR) continue;
        if (came <= 0) {
            if (came == 0 || !would_block(errno)) lose(link, came ? errno : 0);
            return moved;
        }
        moved = true;
        turn -= came;
        if (header) {
            link.heard_bytes += came;
            if (link.heard_bytes == static_cast<int64_t>(sizeof(Header)) && !open(link, peer)) return moved;
            continue;
        }
        link.to += came;
        link.rest -= came;
        if (link.rest == 0) taken(link, peer);
    }
    return moved;
}

// Find out what the message is whose header is here. False where its word was not begun yet, or it is none.
bool Mesh::open(Link& link, int peer) {
    const Header& heard = link.heard;
    link.early = static_cast<int32_t>(heard.word - next_) >= 0;
    if (link.early) return false;
    Program* program = find(heard.word);
    if (program == nullptr || program->form != heard.form) {
        mismatch_ = peer;
        return false;
    }
    const auto& rows = program->heard_by_tag[static_cast<size_t>(peer)];
    const auto found = rows.find(heard.tag);
    if (found == rows.end()) {
        mismatch_ = peer;
        return false;
    }
    link.row = found->second;
    const Row& row = program->rows[static_cast<size_t>(link.row)];
    const Piece& piece = program->pieces[static_cast<size_t>(row.piece)];
    const int64_t message = heard.message;
    const bool due = message < piece.messages() && !program->came[static_cast<size_t>(link.row)][heard.message] &&
                     (row.does == kAdd ? piece.done[static_cast<size_t>(message)] <= row.stage
                                       : piece.done[static_cast<size_t>(message)] == row.stage);
    if (!due) {
        mismatch_ = peer;
        return false;
    }
    program->came[static_cast<size_t>(link.row)][heard.message] = true;
    link.hearing = program;
    link.rest = piece.length(message);
    if (row.does == kAdd) {
        link.buffer.push_back(room());
        link.to = link.buffer.front().bytes.get();
    } else {
        link.to = piece.place(message);
    }
    return true;
}

// A message is here, all of it.
void Mesh::taken(Link& link, int peer) {
    Program& program = *link.hearing;
    const Row& row = program.rows[static_cast<size_t>(link.row)];
    const int64_t message = link.heard.message;
    link.hearing = nullptr;
    link.heard_bytes = 0;
    program.left--;
    program.awaited[static_cast<size_t>(peer)]--;
    if (row.does == kKeep) {
        step(program, row.piece, message);
    } else {
        Piece& piece = program.pieces[static_cast<size_t>(row.piece)];
        piece.early.push_back({message, row.stage, row.peer, std::move(link.buffer.front())});
        link.buffer.clear();
    }
    add(program, row.piece, message);
}

// Add up what is here for the message's present stage, once all of it is: by rank, so that the sum is always the same.
void Mesh::add(Program& program, int32_t number, int64_t message) {
    Piece& piece = program.pieces[static_cast<size_t>(number)];
    for (;;) {
        const int32_t stage = piece.done[static_cast<size_t>(message)];
        const int32_t adders = piece.stages[static_cast<size_t>(stage)].adders;
        if (adders == 0) return;
        std::vector<std::pair<int32_t, const void*>> here{{rank_, piece.place(message)}};
        for (const Piece::Early& each : piece.early) {
            if (each.message == message && each.stage == stage) here.push_back({each.peer, each.buffer.bytes.get()});
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
            } else if (spare_.size() < kSpares) {
                spare_.push_back(std::move(each.buffer));
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

// Sleep until a socket can take or give something. False where a signal came.
bool Mesh::rest(int milliseconds) {
    std::vector<pollfd> sockets;
    for (const Link& link : links_) {
        if (link.socket < 0 || link.gone) continue;
        const int events = (link.early ? 0 : POLLIN) | (link.ready.empty() ? 0 : POLLOUT);
        if (events) sockets.push_back({link.socket, static_cast<short>(events), 0});
    }
    return poll(sockets.data(), static_cast<nfds_t>(sockets.size()), milliseconds) >= 0 || errno != EINTR;
}

Buffer Mesh::room() {
    if (spare_.empty()) return Buffer(static_cast<size_t>(kMessageBytes));
    Buffer found = std::move(spare_.back());
    spare_.pop_back();
    return found;
}

}  // namespace gossamer

using namespace gossamer;

// sockets: by rank, connected and without a delay for small packets; -1 at `rank`. Null where there is no memory.
GOSSAMER_EXPORT void* gossamer_mesh_open(int64_t rank, const int32_t* sockets, int64_t world) try {
    return new Mesh(static_cast<int>(rank), sockets, static_cast<int>(world));
} catch (const std::bad_alloc&) {
    return nullptr;
}

GOSSAMER_EXPORT int64_t gossamer_mesh_close(void* mesh) {
    delete static_cast<Mesh*>(mesh);
    return kFinished;
}

// The number of the word that was begun. Memory at `places` belongs to the mesh until it was waited for.
GOSSAMER_EXPORT int64_t gossamer_mesh_begin(void* mesh, const int32_t* rows, int64_t row_count, void* const* places,
                                            const int64_t* sizes, int64_t piece_count, int64_t format, double divisor,
                                            int64_t form) try {
    static_assert(sizeof(Row) == 5 * sizeof(int32_t), "rows are read as they are");
    return static_cast<Mesh*>(mesh)->begin(reinterpret_cast<const Row*>(rows), row_count, places, sizes, piece_count,
                                           static_cast<int32_t>(format), divisor, static_cast<uint32_t>(form));
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

// An Ending; kGone and kMismatch name the peer.
GOSSAMER_EXPORT int64_t gossamer_mesh_wait(void* mesh, int64_t word, int64_t milliseconds, int32_t* peer,
                                           int32_t* error) try {
    return static_cast<Mesh*>(mesh)->wait(static_cast<uint32_t>(word), static_cast<int>(milliseconds), peer, error);
} catch (const std::bad_alloc&) {
    return kNoMemory;
}
