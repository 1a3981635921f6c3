// Threads that share the work of one call, with whoever calls.

#pragma once

#include <cstdint>

namespace gossamer {

// How many threads may work on what this thread calls, itself included; 1 until gossamer_use_threads says otherwise.
int64_t threads();

// work(what, 0) to work(what, count - 1), in any order and on threads() threads. Returns when all are done.
void run_shared(int64_t count, void (*work)(void*, int64_t), void* what);

}  // namespace gossamer
