// Programs of messages: what one rank does so that a word is answered, in rows, and how far each piece of memory is.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "shared_memory.hpp"

namespace gossamer {

enum Does : int32_t { kSend = 0, kAdd = 1, kKeep = 2 };

// What a program's rows say. stage: how often its piece changes before this happens; tag: the message's name, the same
// at both ends, used once between them.
struct Row {
    int32_t does, peer, piece, stage, tag;
};

struct Buffer {
    Buffer() = default;
    explicit Buffer(size_t nbytes) : bytes(new char[nbytes]) {}
    std::unique_ptr<char[]> bytes;
};

// One piece of memory, in messages. A message's memory goes through stages: each adds what some peers sent, or keeps it.
// What it begins with may lie elsewhere, and is not written there.
struct Piece {
    struct Stage {
        int32_t adders = 0;  // 0: what comes is kept
        std::vector<int32_t> sends;  // rows that wait for the stage before this one
    };
    struct Early {
        int64_t message;
        int32_t stage, peer;
        int slot;       // of the peer's, where it lies; -1: in the buffer
        Buffer buffer;
    };

    char* at = nullptr;
    const char* source = nullptr;  // what is there before the first stage; the same place, or one that stays as it is
    int64_t nbytes = 0;
    std::vector<Stage> stages;  // one more than there are changes: the last one only sends
    std::vector<int32_t> done;  // by message: how many stages
    std::vector<Early> early;   // heard, and not added yet

    int64_t messages() const { return (nbytes + kMessageBytes - 1) / kMessageBytes; }
    char* place(int64_t message) const { return at + message * kMessageBytes; }
    const char* place_after(int64_t message, int32_t stages_done) const {
        return stages_done ? place(message) : source + message * kMessageBytes;
    }
    int64_t length(int64_t message) const {
        const int64_t rest = nbytes - message * kMessageBytes;
        return rest < kMessageBytes ? rest : kMessageBytes;
    }
    // Whether the sum is complete at the end of this stage: nobody sends what would replace it.
    bool ends_at(int32_t stage) const { return stage + 2 == static_cast<int32_t>(stages.size()); }
};

struct Program {
    uint32_t word, form;
    int32_t format;
    double divisor;
    std::vector<Row> rows;
    std::vector<Piece> pieces;
    std::vector<std::map<uint32_t, int32_t>> heard_by_tag;  // by peer: the row that takes a message
    std::vector<std::vector<bool>> came;  // by row and message: whether it was heard, since nothing is heard twice
    std::vector<int64_t> awaited;         // by peer: messages
    int64_t left = 0;              // messages to send and to take

    Program(const Row* given, int64_t row_count, void* const* places, const void* const* sources, const int64_t* sizes,
            int64_t piece_count, size_t world)
        : rows(given, given + row_count),
          pieces(static_cast<size_t>(piece_count)),
          heard_by_tag(world),
          came(static_cast<size_t>(row_count)),
          awaited(world) {
        for (size_t i = 0; i < pieces.size(); i++) {
            pieces[i].at = static_cast<char*>(places[i]);
            pieces[i].source = static_cast<const char*>(sources[i]);
            pieces[i].nbytes = sizes[i];
            pieces[i].stages.resize(1);
            pieces[i].done.assign(static_cast<size_t>(pieces[i].messages()), 0);
        }
        for (int32_t i = 0; i < static_cast<int32_t>(row_count); i++) take_in(i);
    }

    Piece& piece_of(const Row& row) { return pieces[static_cast<size_t>(row.piece)]; }
    const Piece& piece_of(const Row& row) const { return pieces[static_cast<size_t>(row.piece)]; }
    int64_t most_messages() const {
        int64_t most = 0;
        for (const Piece& piece : pieces) most = std::max(most, piece.messages());
        return most;
    }
    bool finished() const { return left == 0; }

   private:
    void take_in(int32_t number) {
        const Row& row = rows[static_cast<size_t>(number)];
        Piece& piece = piece_of(row);
        const size_t needs = static_cast<size_t>(row.stage) + (row.does == kSend ? 1 : 2);
        if (piece.stages.size() < needs) piece.stages.resize(needs);
        Piece::Stage& stage = piece.stages[static_cast<size_t>(row.stage)];
        left += piece.messages();
        if (row.does == kSend) {
            stage.sends.push_back(number);
            return;
        }
        if (row.does == kAdd) stage.adders++;
        came[static_cast<size_t>(number)].resize(static_cast<size_t>(piece.messages()));
        heard_by_tag[static_cast<size_t>(row.peer)][static_cast<uint32_t>(row.tag)] = number;
        awaited[static_cast<size_t>(row.peer)] += piece.messages();
    }
};

}  // namespace gossamer
