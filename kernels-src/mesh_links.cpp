// How the messages of mesh.hpp go through a connection: headers, pieces, slots, and what is refused.

#include "mesh.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // where it does not exist the socket itself was told
#endif

namespace gossamer {
namespace {

constexpr int64_t kTurnBytes = 4 * kMessageBytes;  // taken from one peer before the others have their turn
constexpr int kMostNaps = 10;  // for want of a slot, before the socket takes the message

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// A call that transfers at most `room` bytes of these parts, which are shortened.
msghdr within(iovec* parts, int count, int64_t room) {
    for (int i = 0; i < count; i++) {
        parts[i].iov_len = std::min(parts[i].iov_len, static_cast<size_t>(room));
        room -= static_cast<int64_t>(parts[i].iov_len);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
    return message;
}

}  // namespace

// Decide how the next message travels, make its header, and seal it. False where it had better wait for a slot, or cannot
// be sealed.
bool Mesh::prepare(Link& link) {
    const auto& [program, number, message] = link.ready.front();
    const Row& row = program->rows[static_cast<size_t>(number)];
    const Piece& piece = program->piece_of(row);
    int slot = -1;
    if (link.out.count() > 0 && piece.length(message) >= kSharedFromBytes) {
        slot = link.out.vacant();
        if (slot < 0 && link.naps < kMostNaps) return false;
    }
    if (slot >= 0) {
        link.naps = 0;
        link.out.fill(slot, piece.place_after(message, row.stage), piece.length(message));
    }
    link.saying = {program->word, program->form, static_cast<uint32_t>(row.tag), Header::place_of(message, slot)};
    if (link.seals) {
        char* const header = link.sealed.bytes.get();
        const bool sealed =
            link.seals.seal(reinterpret_cast<const char*>(&link.saying), sizeof(Header), header) &&
            (slot >= 0 || link.seals.seal(piece.place_after(message, row.stage), piece.length(message), header + link.header_bytes()));
        if (!sealed) {
            lose(link, ENOMEM);  // all that keeps libcrypto from encrypting
            return false;
        }
    }
    return link.begun = true;
}

// Hand over as much as the socket takes. Whether it took anything.
bool Mesh::send(Link& link) {
    bool moved = false;
    while (!link.ready.empty()) {
        if (!link.begun && !prepare(link)) return moved;
        const Link::Outgoing& next = link.ready.front();
        const Row& row = next.program->rows[static_cast<size_t>(next.row)];
        const Piece& piece = next.program->piece_of(row);
        const bool follows = link.saying.slot() < 0;
        const int64_t tag = link.seals ? kTagBytes : 0, head = static_cast<int64_t>(sizeof(Header)) + tag;
        const int64_t all = head + (follows ? piece.length(next.message) + tag : 0);
        const int64_t room = link.meter ? link.meter.room(kUp) : all;
        if (room <= 0) return moved;
        iovec parts[2];
        int count = 0;
        if (link.seals) {
            parts[count++] = {link.sealed.bytes.get() + link.sent, static_cast<size_t>(all - link.sent)};
        } else {
            char* const header = reinterpret_cast<char*>(&link.saying);
            if (link.sent < head) parts[count++] = {header + link.sent, static_cast<size_t>(head - link.sent)};
            const int64_t begun = std::max<int64_t>(0, link.sent - head);
            char* const bytes = const_cast<char*>(piece.place_after(next.message, row.stage));  // sendmsg only reads
            if (follows) parts[count++] = {bytes + begun, static_cast<size_t>(all - head - begun)};
        }
        msghdr message = within(parts, count, room);
        const ssize_t took = sendmsg(link.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (took < 0) {
            if (errno == EINTR) continue;
            if (!would_block(errno)) lose(link, errno);
            return moved;
        }
        moved = true;
        if (link.meter) link.meter.transfer(kUp, took);
        link.moved += took;
        link.sent += took;
        if (link.sent < all) return moved;
        link.sent = 0;
        link.begun = false;
        next.program->left--;
        link.ready.pop_front();
    }
    return moved;
}

// Take what has arrived, but leave the others their turn. Whether anything had.
bool Mesh::hear(Link& link, int peer) {
    if (link.early && !open(link, peer)) return false;
    if (!link.meter) return hear(link, peer, kTurnBytes);
    const int64_t room = link.meter.room(kDown), before = link.moved;
    const bool moved = room > 0 && hear(link, peer, room);
    if (link.moved > before) link.meter.transfer(kDown, link.moved - before);
    return moved;
}

bool Mesh::hear(Link& link, int peer, int64_t turn) {
    bool moved = false;
    while (turn > 0 && mismatch_ < 0) {
        const bool header = link.hearing == nullptr;
        iovec parts[2];
        int count = 0;
        if (header) {
            parts[count++] = {link.header + link.header_came, static_cast<size_t>(link.header_bytes() - link.header_came)};
        } else {
            if (link.rest > 0) parts[count++] = {link.to, static_cast<size_t>(link.rest)};
            char* const tag = link.tag + kTagBytes - link.tag_rest;
            if (link.tag_rest > 0) parts[count++] = {tag, static_cast<size_t>(link.tag_rest)};
        }
        msghdr message = within(parts, count, turn);
        const ssize_t came = recvmsg(link.socket, &message, MSG_DONTWAIT);
        if (came < 0 && errno == EINTR) continue;
        if (came <= 0) {
            if (came == 0 || !would_block(errno)) lose(link, came ? errno : 0);
            return moved;
        }
        moved = true;
        link.moved += came;
        turn -= came;
        if (header) {
            link.header_came += came;
            if (link.header_came < link.header_bytes()) continue;
            if (!read_header(link) || !open(link, peer)) return moved;
            if (link.heard.slot() >= 0) turn -= kMessageBytes;
            continue;
        }
        const int64_t plain = std::min<int64_t>(came, link.rest);
        link.to += plain;
        link.rest -= plain;
        link.tag_rest -= came - plain;
        if (link.rest > 0 || link.tag_rest > 0) continue;
        if (link.opens && !unseal(link)) return moved;
        taken(link, peer);
    }
    return moved;
}

// False where it is not the one that the peer sealed.
bool Mesh::read_header(Link& link) {
    const bool whole = !link.opens || link.opens.open(link.header, sizeof(Header), link.header + sizeof(Header));
    if (!whole) {
        change(link);
        return false;
    }
    std::memcpy(&link.heard, link.header, sizeof(Header));
    return true;
}

// Open the piece that has come. What was taken in its place and is not what the peer sealed is wiped.
bool Mesh::unseal(Link& link) {
    const Piece& piece = link.hearing->piece_of(link.hearing->rows[static_cast<size_t>(link.row)]);
    const int64_t length = piece.length(link.heard.message());
    char* const bytes = link.to - length;
    if (link.opens.open(bytes, length, link.tag)) return true;
    std::memset(bytes, 0, static_cast<size_t>(length));
    change(link);
    return false;
}

// Nothing that comes after what was changed can be trusted, and the peer had better know at once. What it may have said
// last can still be read.
void Mesh::change(Link& link) {
    lose(link, kChanged);
    shutdown(link.socket, SHUT_WR);
}

// Find out what the message is whose header is here, and take it where it lies in a slot. False where its word was not
// begun yet, or it is none.
bool Mesh::open(Link& link, int peer) {
    const Header& heard = link.heard;
    link.early = static_cast<int32_t>(heard.word - next_) >= 0;
    if (link.early) return false;
    Program* program = find(heard.word);
    if (program == nullptr || program->form != heard.form) return refuse(peer);
    const auto& rows = program->heard_by_tag[static_cast<size_t>(peer)];
    const auto found = rows.find(heard.tag);
    if (found == rows.end()) return refuse(peer);
    link.row = found->second;
    const Row& row = program->rows[static_cast<size_t>(link.row)];
    const Piece& piece = program->piece_of(row);
    const int64_t message = heard.message();
    std::vector<bool>& came = program->came[static_cast<size_t>(link.row)];
    const bool due = message < piece.messages() && !came[static_cast<size_t>(message)] &&
                     (row.does == kAdd ? piece.done[static_cast<size_t>(message)] <= row.stage
                                       : piece.done[static_cast<size_t>(message)] == row.stage);
    if (!due || (heard.slot() >= 0 && !link.in.hold(heard.slot()))) return refuse(peer);
    came[static_cast<size_t>(message)] = true;
    link.hearing = program;
    link.rest = piece.length(message);
    link.tag_rest = link.opens ? kTagBytes : 0;
    if (heard.slot() >= 0) {
        taken(link, peer);
    } else if (row.does == kAdd) {
        link.buffer = room();
        link.to = link.buffer.bytes.get();
    } else {
        link.to = piece.place(message);
    }
    return true;
}

// A message is here, all of it.
void Mesh::taken(Link& link, int peer) {
    Program& program = *link.hearing;
    const Row& row = program.rows[static_cast<size_t>(link.row)];
    const int64_t message = link.heard.message();
    const int slot = link.heard.slot();
    Piece& piece = program.piece_of(row);
    link.hearing = nullptr;
    link.header_came = 0;
    program.left--;
    program.awaited[static_cast<size_t>(peer)]--;
    if (row.does == kAdd) {
        piece.early.push_back({message, row.stage, row.peer, slot, std::move(link.buffer)});
    } else {
        if (slot >= 0) {
            std::memcpy(piece.place(message), link.in.bytes(slot), static_cast<size_t>(piece.length(message)));
            link.in.vacate(slot);
        }
        step(program, row.piece, message);
    }
    add(program, row.piece, message);
    if (row.does == kAdd && 2 * link.in.held() > link.in.count()) make_room(link, piece);
}

}  // namespace gossamer
