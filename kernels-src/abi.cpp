#include "common.hpp"

// Raise with every change to an exported function's arguments or their meaning, together with ABI in native.py.
GOSSAMER_EXPORT int64_t gossamer_abi() { return 1; }
