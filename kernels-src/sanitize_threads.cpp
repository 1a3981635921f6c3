// Under the thread sanitizer: `build.py sanitize-threads`.

#include "sanitize_threads.hpp"

int main() {
    gossamer_sanitize::sanitize_threads();
    std::puts("sanitize-threads: passed");
}
