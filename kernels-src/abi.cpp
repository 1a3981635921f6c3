#include "common.hpp"

// Raise with every new exported function and every change to an old one's arguments or their meaning, together with
// ABI in native.py.
GOSSAMER_EXPORT int64_t gossamer_abi() { return 18; }
