// Two symbols of newer versions of glibc that GCC's static libstdc++ refers to. Only wheels contain them: they are
// linked with glibc 2.28, which has neither.

#include <sys/random.h>

extern "C" {

// Since 2.32. False is always correct: reference counts are then atomic.
char __libc_single_threaded = 0;

// Since 2.36.
unsigned arc4random() {
    unsigned drawn = 0;
    while (getrandom(&drawn, sizeof drawn, 0) != static_cast<ssize_t>(sizeof drawn)) {
    }
    return drawn;
}

}  // extern "C"
