// A cipher that hides nothing, in the place of libcrypto's: what sealed meshes are run with under the sanitizers. Any byte
// that is changed, in another place or under another nonce changes its tag; part of sanitize.cpp.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mesh.hpp"

namespace gossamer_sanitize {

struct ToyCipher {
    uint64_t key = 0, state = 0;
    unsigned char wanted[gossamer::kTagBytes] = {};

    void begin(const unsigned char* nonce) {
        state = key;
        for (int i = 0; i < 12; i++) take(nonce[i]);
    }
    void take(unsigned char byte) { state = (state ^ byte) * 0x100000001b3u + 1; }
    unsigned char mask(int i) const { return static_cast<unsigned char>(key >> 8 * (i % 8)); }
    void tag(unsigned char* to) const {
        for (int i = 0; i < gossamer::kTagBytes; i++) to[i] = static_cast<unsigned char>(state >> 8 * (i % 8));
    }
};

inline ToyCipher* toy(void* context) { return static_cast<ToyCipher*>(context); }
inline void* toy_make() { return new ToyCipher; }
inline void toy_free(void* context) { delete toy(context); }

inline int toy_init(void* context, const void*, void*, const unsigned char* key, const unsigned char* nonce) {
    if (key != nullptr) std::memcpy(&toy(context)->key, key, sizeof toy(context)->key);
    if (nonce != nullptr) toy(context)->begin(nonce);
    return 1;
}

inline int toy_encrypt(void* context, unsigned char* to, int* count, const unsigned char* from, int nbytes) {
    for (int i = 0; i < nbytes; i++) {
        toy(context)->take(from[i]);
        to[i] = from[i] ^ toy(context)->mask(i);
    }
    *count = nbytes;
    return 1;
}

inline int toy_decrypt(void* context, unsigned char* to, int* count, const unsigned char* from, int nbytes) {
    for (int i = 0; i < nbytes; i++) {
        to[i] = from[i] ^ toy(context)->mask(i);
        toy(context)->take(to[i]);
    }
    *count = nbytes;
    return 1;
}

inline int toy_encrypt_end(void*, unsigned char*, int* count) {
    *count = 0;
    return 1;
}

inline int toy_decrypt_end(void* context, unsigned char*, int* count) {
    unsigned char found[gossamer::kTagBytes];
    toy(context)->tag(found);
    *count = 0;
    return std::memcmp(found, toy(context)->wanted, sizeof found) == 0;
}

inline int toy_control(void* context, int what, int nbytes, void* bytes) {
    if (nbytes != gossamer::kTagBytes) return 0;
    if (what == 0x10) toy(context)->tag(static_cast<unsigned char*>(bytes));
    if (what == 0x11) std::memcpy(toy(context)->wanted, bytes, static_cast<size_t>(nbytes));
    return 1;
}

inline const void* toy_cipher() { return nullptr; }

inline std::array<void*, 10> toy_functions() {
    const gossamer::CipherFunctions functions{toy_make,    toy_free,    toy_init,        toy_encrypt, toy_encrypt_end,
                                              toy_init,    toy_decrypt, toy_decrypt_end, toy_control, toy_cipher};
    std::array<void*, 10> found;
    std::memcpy(found.data(), &functions, sizeof functions);
    return found;
}

// A header that opens, of what was about to be said, with the rest behind it.
inline void toy_sealed(std::vector<uint32_t>& said, const std::vector<unsigned char>& key) {
    said.resize(said.size() < 4 ? 4 : said.size());
    gossamer::SealedWay way;
    gossamer::CipherFunctions functions;
    const auto given = toy_functions();
    std::memcpy(&functions, given.data(), sizeof functions);
    way.start(functions, key.data(), true);
    std::vector<uint32_t> sealed(8);
    way.seal(reinterpret_cast<const char*>(said.data()), sizeof(gossamer::Header), reinterpret_cast<char*>(sealed.data()));
    sealed.insert(sealed.end(), said.begin() + 4, said.end());
    said = sealed;
}

}  // namespace gossamer_sanitize
