// Programs of messages over the connected sockets of a group, moved on by whoever waits for one of them.
//
// A program says what one rank does so that a word is answered: rows that send pieces of memory to a peer, or take what
// a peer sends, either in a piece's place or added to it. Pieces travel in messages of at most kMessageBytes, each with
// a header of 16 bytes, and every message leaves as soon as what it says is known: rounds of different messages overlap,
// so a long table of hops fills the link. Nobody asks whether a receiver is ready: what comes early waits in the
// socket, which holds back its sender.
//
// There is no thread here. All calls for one mesh come from one thread at a time.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace gossamer {

constexpr int64_t kMessageBytes = int64_t{1} << 18;

enum Does : int32_t { kSend = 0, kAdd = 1, kKeep = 2 };

// What a program's rows say. stage: how often its piece changes before this happens; tag: the message's name, the same
// at both ends, used once between them.
struct Row {
    int32_t does, peer, piece, stage, tag;
};

struct Header {
    uint32_t word;   // how many words were begun before this one
    uint32_t form;   // a hash of what every rank says alike in it
    uint32_t tag;
    uint32_t message;  // which of the piece's
};
static_assert(sizeof(Header) == 16, "headers travel as they are");

// What to wait for a program brings. The same numbers are in src/gossamer/transports/mesh.py.
enum Ending : int64_t { kFinished = 0, kNotYet = 1, kGone = -11, kMismatch = -12, kUnknown = -13 };

struct Buffer {
    explicit Buffer(size_t nbytes) : bytes(new char[nbytes]) {}
    std::unique_ptr<char[]> bytes;
};

// One piece of memory, in messages. A message's memory goes through stages: each adds what some peers sent, or keeps it.
struct Piece {
    struct Stage {
        int32_t adders = 0;  // 0: what comes is kept
        std::vector<int32_t> sends;  // rows that wait for the stage before this one
    };
    struct Early {
        int64_t message;
        int32_t stage, peer;
        Buffer buffer;
    };

    char* at = nullptr;
    int64_t nbytes = 0;
    std::vector<Stage> stages;  // one more than there are changes: the last one only sends
    std::vector<int32_t> done;  // by message: how many stages
    std::vector<Early> early;   // heard, and not added yet

    int64_t messages() const { return (nbytes + kMessageBytes - 1) / kMessageBytes; }
    char* place(int64_t message) const { return at + message * kMessageBytes; }
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

    bool finished() const { return left == 0; }
};

// What is to be sent next, and what is being heard, over one socket.
struct Link {
    struct Outgoing {
        Program* program;
        int32_t row;
        int64_t message;
    };

    int socket = -1;
    std::deque<Outgoing> ready;
    int64_t sent = 0;  // bytes of the first one, its header included
    Header saying{};

    Header heard{};
    int64_t heard_bytes = 0;      // of the header
    Program* hearing = nullptr;   // whose message it is, once that is known
    int32_t row = 0;
    char* to = nullptr;
    int64_t rest = 0;             // bytes of it that are still to come
    std::vector<Buffer> buffer;   // what it is taken into, where it is added; one or none
    bool early = false;           // the header names a word that was not begun here
    int gone = 0;                 // the error that ended it; -1: the peer closed it
};

class Mesh {
   public:
    Mesh(int rank, const int* sockets, int world);
    int64_t begin(const Row* rows, int64_t row_count, void* const* places, const int64_t* sizes, int64_t piece_count,
                  int32_t format, double divisor, uint32_t form);
    // Moves everything on until `word` is answered, or so many milliseconds have passed, or a signal came.
    Ending wait(uint32_t word, int milliseconds, int32_t* peer, int32_t* error);

   private:
    Program* find(uint32_t word);
    bool send(Link& link);
    bool hear(Link& link, int peer);
    bool open(Link& link, int peer);
    void taken(Link& link, int peer);
    void add(Program& program, int32_t piece, int64_t message);
    void step(Program& program, int32_t piece, int64_t message);
    bool rest(int milliseconds);
    void lose(Link& link, int error) {
        link.gone = error ? error : -1;
        if (first_gone_ == nullptr) first_gone_ = &link;
    }
    bool blocked(int32_t* peer, int32_t* error) const;
    int ahead(const Program& wanted) const;
    Buffer room();

    int rank_;
    std::vector<Link> links_;
    std::deque<std::unique_ptr<Program>> programs_;  // in the order of their words
    uint32_t next_ = 0;
    int mismatch_ = -1;  // the peer that said something else
    const Link* first_gone_ = nullptr;
    std::vector<Buffer> spare_;
};

}  // namespace gossamer
