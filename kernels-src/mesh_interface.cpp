// The C interface of mesh.hpp, as base/kernels/library.py calls it.

#include "mesh.hpp"

#include <cstring>
#include <new>

#include "common.hpp"

using namespace gossamer;

// sockets: by rank, connected and without a delay for small packets; -1 at `rank`. Null where there is no memory.
GOSSAMER_EXPORT void* gossamer_mesh_open(int64_t rank, const int32_t* sockets, int64_t world) try {
    return new Mesh(static_cast<int>(rank), sockets, static_cast<int>(world));
} catch (const std::bad_alloc&) {
    return nullptr;
}

// memory: of two pages or more, as shared_memory.hpp says, zero at first and mapped until the mesh is closed.
GOSSAMER_EXPORT int64_t gossamer_mesh_share(void* mesh, int64_t peer, void* memory, int64_t nbytes) {
    const int64_t slots = (nbytes - kTurnsBytes) / (2 * kMessageBytes);
    if (slots < 1 || slots > kMostSlots || nbytes != shared_nbytes(slots)) return kMisfit;
    static_cast<Mesh*>(mesh)->share(static_cast<int>(peer), static_cast<char*>(memory), static_cast<int>(slots));
    return kDone;
}

// memory: of bandwidth.hpp, mapped until the mesh is closed.
GOSSAMER_EXPORT int64_t gossamer_mesh_limit(void* mesh, int64_t peer, void* memory) {
    static_cast<Mesh*>(mesh)->limit(static_cast<int>(peer), static_cast<Bandwidth*>(memory));
    return kDone;
}

// functions: as in CipherFunctions, callable until the mesh is closed. sends, hears: keys of kKeyBytes, of which nothing
// else was ever sealed; they are not kept. Before the first word; kMisfit where the cipher does not take them.
GOSSAMER_EXPORT int64_t gossamer_mesh_seal(void* mesh, int64_t peer, void* const* functions, const void* sends,
                                           const void* hears) try {
    static_assert(sizeof(CipherFunctions) == 10 * sizeof(void*), "pointers to functions are read as they are");
    CipherFunctions found;
    std::memcpy(&found, functions, sizeof found);
    const bool done = static_cast<Mesh*>(mesh)->seal(static_cast<int>(peer), found, static_cast<const unsigned char*>(sends),
                                                     static_cast<const unsigned char*>(hears));
    return done ? kDone : kMisfit;
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

GOSSAMER_EXPORT int64_t gossamer_mesh_close(void* mesh) {
    delete static_cast<Mesh*>(mesh);
    return kFinished;
}

// The number of the word that was begun. Memory at `places` belongs to the mesh until it was waited for. sources: where the
// pieces' first contents are, which may be their places; what lies elsewhere is only read, until then.
GOSSAMER_EXPORT int64_t gossamer_mesh_begin(void* mesh, const int32_t* rows, int64_t row_count, void* const* places,
                                            const void* const* sources, const int64_t* sizes, int64_t piece_count,
                                            int64_t format, double divisor, int64_t form) try {
    static_assert(sizeof(Row) == 5 * sizeof(int32_t), "rows are read as they are");
    return static_cast<Mesh*>(mesh)->begin(reinterpret_cast<const Row*>(rows), row_count, places, sources, sizes, piece_count,
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

// What a rank says when it hangs up, sealed and opened in place. words: nbytes, and kTagBytes behind them. kMisfit where it
// has been said before, or does not open, or the connection is not sealed.
GOSSAMER_EXPORT int64_t gossamer_mesh_seal_words(void* mesh, int64_t peer, void* words, int64_t nbytes) {
    return static_cast<Mesh*>(mesh)->seal_words(static_cast<int>(peer), static_cast<char*>(words), nbytes) ? kDone : kMisfit;
}
GOSSAMER_EXPORT int64_t gossamer_mesh_open_words(void* mesh, int64_t peer, void* words, int64_t nbytes) {
    return static_cast<Mesh*>(mesh)->open_words(static_cast<int>(peer), static_cast<char*>(words), nbytes) ? kDone : kMisfit;
}

// 1 where what follows on the socket to this peer follows a whole message.
GOSSAMER_EXPORT int64_t gossamer_mesh_is_between_messages(void* mesh, int64_t peer) {
    return static_cast<Mesh*>(mesh)->is_between_messages(static_cast<int>(peer)) ? 1 : 0;
}

// kNotYet, and whom the word waits for: two numbers for every rank, as Mesh::waits_for says.
GOSSAMER_EXPORT int64_t gossamer_mesh_waits_for(void* mesh, int64_t word, int64_t* moved, int32_t* next) {
    return static_cast<Mesh*>(mesh)->waits_for(static_cast<uint32_t>(word), moved, next);
}
