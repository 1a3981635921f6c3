// Messages that are sealed on their way: authenticated encryption (AEAD) by functions of a libcrypto that the caller found.
//
// One direction of one connection has a key of its own, and counts what it seals: a header, then the piece that follows it,
// if one does. The count is the nonce and never travels, so whatever is changed, left out, said twice, said elsewhere or in
// another order does not open: both ends count the same only while each takes all that the other said, as it was said. A
// header is opened before anybody acts on it, a piece before anybody adds it.
//
// Of what lies in memory that two workers of one machine share only the headers are sealed: who could read or change it
// there could read the workers themselves.

#pragma once

#include <cstdint>
#include <limits>
#include <utility>

namespace gossamer {

constexpr int64_t kTagBytes = 16;  // behind everything that is sealed
constexpr int64_t kKeyBytes = 32;

// Of libcrypto's EVP_..., in the order of FUNCTIONS in src/gossamer/comm/libcrypto.py.
struct CipherFunctions {
    void* (*make)();
    void (*free)(void*);
    int (*encrypt_init)(void*, const void* cipher, void*, const unsigned char* key, const unsigned char* nonce);
    int (*encrypt)(void*, unsigned char* to, int* count, const unsigned char* from, int nbytes);
    int (*encrypt_end)(void*, unsigned char*, int*);
    int (*decrypt_init)(void*, const void* cipher, void*, const unsigned char* key, const unsigned char* nonce);
    int (*decrypt)(void*, unsigned char* to, int* count, const unsigned char* from, int nbytes);
    int (*decrypt_end)(void*, unsigned char*, int*);
    int (*control)(void*, int what, int nbytes, void* bytes);
    const void* (*cipher)();  // a key of kKeyBytes, a nonce of 12 bytes, a tag of kTagBytes
};

// One direction: both ends make one of the same key, and only one of them seals. None, until it is given a key.
class SealedWay {
   public:
    SealedWay() = default;
    SealedWay(const SealedWay&) = delete;
    SealedWay& operator=(const SealedWay&) = delete;
    ~SealedWay() {
        if (context_ != nullptr) of_.free(context_);  // which wipes the key
    }
    explicit operator bool() const { return context_ != nullptr; }

    // The key is not kept here. False where libcrypto does not take it.
    bool start(const CipherFunctions& functions, const unsigned char* key, bool seals) {
        of_ = functions;
        context_ = of_.make();
        if (context_ == nullptr) return false;
        return (seals ? of_.encrypt_init : of_.decrypt_init)(context_, of_.cipher(), nullptr, key, nullptr) == 1;
    }

    // The bytes and their tag. False where that cannot be done: then nothing may be sent.
    bool seal(const char* plain, int64_t nbytes, char* sealed) {
        unsigned char nonce[12];
        return next(nonce) && seal_by(nonce, plain, nbytes, sealed);
    }

    // In place. False where this is not what was sealed next: then the bytes mean nothing.
    bool open(char* bytes, int64_t nbytes, const char* tag) {
        unsigned char nonce[12];
        return next(nonce) && open_by(nonce, bytes, nbytes, tag);
    }

    // What is said when a connection ends, wherever its messages were: by a nonce of its own, and so once. In place.
    bool seal_last(char* bytes, int64_t nbytes) {
        return !std::exchange(said_last_, true) && seal_by(kLast, bytes, nbytes, bytes);
    }
    bool open_last(char* bytes, int64_t nbytes) { return open_by(kLast, bytes, nbytes, bytes + nbytes); }

   private:
    static constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG
    static constexpr unsigned char kLast[12] = {0, 0, 0, 1};  // which no count comes to: these four bytes are 0 in all

    bool seal_by(const unsigned char* nonce, const char* plain, int64_t nbytes, char* sealed) {
        int count = 0;
        auto* to = reinterpret_cast<unsigned char*>(sealed);
        return of_.encrypt_init(context_, nullptr, nullptr, nullptr, nonce) == 1 &&
               of_.encrypt(context_, to, &count, reinterpret_cast<const unsigned char*>(plain), static_cast<int>(nbytes)) == 1 &&
               count == nbytes && of_.encrypt_end(context_, to + nbytes, &count) == 1 &&
               of_.control(context_, kGetTag, kTagBytes, sealed + nbytes) == 1;
    }

    bool open_by(const unsigned char* nonce, char* bytes, int64_t nbytes, const char* tag) {
        int count = 0;
        auto* at = reinterpret_cast<unsigned char*>(bytes);
        return of_.decrypt_init(context_, nullptr, nullptr, nullptr, nonce) == 1 &&
               of_.decrypt(context_, at, &count, at, static_cast<int>(nbytes)) == 1 && count == nbytes &&
               of_.control(context_, kSetTag, kTagBytes, const_cast<char*>(tag)) == 1 &&
               of_.decrypt_end(context_, at + nbytes, &count) == 1;
    }

    // A nonce that this key has not met: two with the same one would tell each other's bytes, and allow forgeries.
    bool next(unsigned char* nonce) {
        if (count_ == std::numeric_limits<uint64_t>::max()) return false;
        const uint64_t count = count_++;
        for (int i = 0; i < 12; i++) nonce[i] = i < 4 ? 0 : static_cast<unsigned char>(count >> 8 * (11 - i));
        return true;
    }

    CipherFunctions of_{};
    void* context_ = nullptr;
    uint64_t count_ = 0;
    bool said_last_ = false;
};

}  // namespace gossamer
