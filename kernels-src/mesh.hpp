// Programs of messages over the connected sockets of a group, moved on by whoever waits for one of them.
//
// A program says what one rank does so that a word is answered: rows that send pieces of memory to a peer, or take what
// a peer sends, either in a piece's place or added to it. Pieces travel in messages of at most kMessageBytes, each with
// a header of 16 bytes, and every message leaves as soon as what it says is known: rounds of different messages overlap,
// so a long table of hops fills the link. Nobody asks whether a receiver is ready: what comes early waits in the
// socket, which holds back its sender. Between workers of one machine the bytes of a message may lie in a slot of memory
// that both see (shared_memory.hpp), and its header says in which. A sender that finds no slot vacant looks again soon, a
// few times, and then has the socket take the message: so nobody waits for a slot, and nobody needs to be woken for one.
//
// There is no thread here. All calls for one mesh come from one thread at a time.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "bandwidth.hpp"
#include "mesh_program.hpp"
#include "mesh_sealing.hpp"
#include "shared_memory.hpp"

namespace gossamer {

constexpr int kMessageBits = 26;  // of a header's last number: 2**26 messages are 16 TiB
static_assert(kMostSlots < 1 << (32 - kMessageBits), "a header has room for the number of a slot");

struct Header {
    uint32_t word;   // how many words were begun before this one
    uint32_t form;   // a hash of what every rank says alike in it
    uint32_t tag;
    uint32_t place;

    // place: which of the piece's messages it is, and the slot that holds it, or -1 where it follows.
    static uint32_t place_of(int64_t message, int slot) {
        return static_cast<uint32_t>(message) | static_cast<uint32_t>(slot + 1) << kMessageBits;
    }
    int64_t message() const { return place & ((1u << kMessageBits) - 1); }
    int slot() const { return static_cast<int>(place >> kMessageBits) - 1; }
};
static_assert(sizeof(Header) == 16, "headers travel as they are");

// What ended a connection, where it is no error of the system's. The same numbers are in native_mesh.py.
enum Gone : int { kHungUp = -1, kChanged = -2 };

// What to wait for a program brings. The same numbers are in src/gossamer/comm/mesh/native_mesh.py.
enum Ending : int64_t { kFinished = 0, kNotYet = 1, kGone = -11, kMismatch = -12, kUnknown = -13 };

// What is to be sent next, and what is being heard, over one socket.
struct Link {
    struct Outgoing {
        Program* program;
        int32_t row;
        int64_t message;
    };

    int socket = -1;
    std::deque<Outgoing> ready;
    bool begun = false;  // the first one's header is made, and its bytes are in their slot if they have one
    int64_t sent = 0;    // bytes of it, its header included
    Header saying{};
    SealedWay seals;
    Buffer sealed;       // the first one's header and bytes, as they travel
    Slots out;
    int naps = 0;        // for want of a slot, since there was one

    char header[sizeof(Header) + kTagBytes];  // as it travels
    int64_t header_came = 0;      // bytes of it
    Header heard{};
    SealedWay opens;
    Program* hearing = nullptr;   // whose message it is, once that is known
    int32_t row = 0;
    char* to = nullptr;
    int64_t rest = 0;             // bytes of it that are still to come
    Buffer buffer;                // what it is taken into, where it is added
    char tag[kTagBytes];
    int64_t tag_rest = 0;         // bytes of its tag that are still to come
    Slots in;
    bool early = false;           // the header names a word that was not begun here
    int64_t moved = 0;            // bytes that came and went over it so far, of all words
    int gone = 0;                 // the error that ended it, or one of Gone
    Meter meter;                  // of bandwidth limits

    int64_t header_bytes() const { return static_cast<int64_t>(sizeof(Header)) + (opens ? kTagBytes : 0); }
};

class Mesh {
   public:
    Mesh(int rank, const int* sockets, int world);
    // memory: what shared_nbytes says for so many slots, and zero; the peer sees it, too.
    void share(int peer, char* memory, int slots);
    // memory: of bandwidth.hpp, which limits what is sent to and received from this peer.
    void limit(int peer, Bandwidth* memory) { links_[static_cast<size_t>(peer)].meter.shared = memory; }
    // Before anything is said. Keys of kKeyBytes; false where the cipher does not take them.
    bool seal(int peer, const CipherFunctions& functions, const unsigned char* sends, const unsigned char* hears);
    // sources: where the pieces' first contents are: their places, or memory that is only read.
    int64_t begin(const Row* rows, int64_t row_count, void* const* places, const void* const* sources,
                  const int64_t* sizes, int64_t piece_count, int32_t format, double divisor, uint32_t form);
    // Moves everything on until `word` is answered, or so many milliseconds have passed, or a signal came.
    Ending wait(uint32_t word, int milliseconds, int32_t* peer, int32_t* error);
    // Whom a word waits for. By rank, moved: how many bytes that connection has carried so far, or -1 where the word needs
    // nothing more of it; next: 1 for those whose part the others wait for, too, as far as that can be told from here.
    Ending waits_for(uint32_t word, int64_t* moved, int32_t* next);
    // What is said last over a connection that is sealed, with room for its tag behind it. False over any other.
    bool seal_words(int peer, char* words, int64_t nbytes) {
        SealedWay& way = links_[static_cast<size_t>(peer)].seals;
        return way && way.seal_last(words, nbytes);
    }
    bool open_words(int peer, char* words, int64_t nbytes) {
        SealedWay& way = links_[static_cast<size_t>(peer)].opens;
        return way && way.open_last(words, nbytes);
    }
    // Whether no message to this peer is cut where its bytes have been handed over so far.
    bool is_between_messages(int peer) const { return links_[static_cast<size_t>(peer)].sent == 0; }

   private:
    Program* find(uint32_t word);
    bool prepare(Link& link);
    bool send(Link& link);
    bool hear(Link& link, int peer);
    bool hear(Link& link, int peer, int64_t turn);
    bool read_header(Link& link);
    bool open(Link& link, int peer);
    bool unseal(Link& link);
    bool refuse(int peer) {
        mismatch_ = peer;
        return false;
    }
    void taken(Link& link, int peer);
    void make_room(Link& link, Piece& piece);
    void add(Program& program, int32_t piece, int64_t message);
    void step(Program& program, int32_t piece, int64_t message);
    bool rest(int milliseconds);
    void lose(Link& link, int error) {
        link.gone = error ? error : kHungUp;
        if (first_gone_ == nullptr) first_gone_ = &link;
    }
    void change(Link& link);
    bool blocked(int32_t* peer, int32_t* error) const;
    int ahead(const Program& wanted) const;
    bool missing(const Program& program, int32_t row) const;
    Buffer room();
    void give_back(Piece::Early& early);

    int rank_;
    std::vector<Link> links_;
    std::deque<std::unique_ptr<Program>> programs_;  // in the order of their words
    uint32_t next_ = 0;
    int mismatch_ = -1;  // the peer that said something else
    const Link* first_gone_ = nullptr;
    std::vector<Buffer> spare_;
};

}  // namespace gossamer
