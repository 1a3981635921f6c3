// Repeats the calls that tests/support/kernel_calls.py wrote, with the library of this processor, and compares every byte
// of their buffers and their answers: replay LIBRARY FILE

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

enum Kind : uint8_t { kNumber, kFloat, kBuffer, kPointers };
constexpr uint32_t kNull = 0xffffffffu;

struct File {
    std::FILE* from;

    template <typename T>
    T next() {
        T value{};
        bytes(&value, sizeof value);
        return value;
    }
    void bytes(void* to, size_t count) {
        if (count && std::fread(to, 1, count, from) != count) std::exit((std::fputs("replay: the file ends\n", stderr), 2));
    }
    bool ended() {
        const int next = std::fgetc(from);
        if (next != EOF) std::ungetc(next, from);
        return next == EOF;
    }
};

// Integers and pointers travel in registers of one kind and floating-point numbers in another, in the order of each
// kind; the rest of the integers lies on the stack. So one type of function serves for all.
int64_t call(void* function, const std::vector<int64_t>& w, const double* f) {
    using I = int64_t;
    using D = double;
#if defined(__aarch64__)
    using Any = I (*)(I, I, I, I, I, I, I, I, D, D, D, D, I, I, I, I, I, I, I, I);
    return reinterpret_cast<Any>(function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], f[0], f[1], f[2], f[3], w[8],
                                           w[9], w[10], w[11], w[12], w[13], w[14], w[15]);
#elif defined(__x86_64__) && !defined(_WIN32)
    using Any = I (*)(I, I, I, I, I, I, D, D, D, D, I, I, I, I, I, I, I, I, I, I);
    return reinterpret_cast<Any>(function)(w[0], w[1], w[2], w[3], w[4], w[5], f[0], f[1], f[2], f[3], w[6], w[7], w[8],
                                           w[9], w[10], w[11], w[12], w[13], w[14], w[15]);
#else
#error "the calling convention of this processor is not known"
#endif
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return std::fputs("replay LIBRARY FILE\n", stderr), 2;
    void* library = dlopen(arguments[1], RTLD_NOW);
    File file{std::fopen(arguments[2], "rb")};
    if (library == nullptr || file.from == nullptr) {
        const char* reason = library == nullptr ? dlerror() : arguments[2];
        return std::fprintf(stderr, "replay: cannot open %s\n", reason), 2;
    }
    std::map<std::string, std::pair<int64_t, int64_t>> counts;  // of each function: calls, and those that differ
    while (!file.ended()) {
        std::string name(file.next<uint32_t>(), ' ');
        file.bytes(&name[0], name.size());
        std::vector<std::vector<char>> buffers(file.next<uint32_t>()), due(buffers.size());
        for (size_t i = 0; i < buffers.size(); i++) {
            const size_t size = file.next<uint64_t>();
            buffers[i].resize(size + 64);
            due[i].resize(size);
            file.bytes(buffers[i].data(), size);
            file.bytes(due[i].data(), size);
        }
        std::vector<int64_t> words;
        std::vector<std::vector<void*>> pointers(file.next<uint32_t>());
        double floats[4] = {};
        int64_t of_floats = 0;
        const auto at = [&](uint32_t index) -> void* { return index == kNull ? nullptr : buffers[index].data(); };
        for (std::vector<void*>& several : pointers) {
            switch (file.next<uint8_t>()) {
                case kNumber: words.push_back(file.next<int64_t>()); break;
                case kFloat: floats[of_floats++] = file.next<double>(); break;
                case kBuffer: words.push_back(reinterpret_cast<int64_t>(at(file.next<uint32_t>()))); break;
                default:
                    several.resize(file.next<uint32_t>());
                    for (void*& each : several) each = at(file.next<uint32_t>());
                    words.push_back(reinterpret_cast<int64_t>(several.data()));
            }
        }
        const int64_t answer_due = file.next<int64_t>();
        words.resize(16);
        void* function = dlsym(library, name.c_str());
        if (function == nullptr) return std::fprintf(stderr, "replay: no %s\n", name.c_str()), 2;
        bool equal = call(function, words, floats) == answer_due;
        for (size_t i = 0; i < due.size() && answer_due >= 0; i++) {
            equal = equal && std::equal(due[i].begin(), due[i].end(), buffers[i].begin());
        }
        counts[name].first++;
        counts[name].second += !equal;
    }
    int64_t calls = 0, differ = 0;
    for (const auto& [name, found] : counts) {
        std::printf("%-36s %6lld calls, %lld differ\n", name.c_str(), static_cast<long long>(found.first),
                    static_cast<long long>(found.second));
        calls += found.first;
        differ += found.second;
    }
    std::printf("replay: %lld calls, %lld differ\n", static_cast<long long>(calls), static_cast<long long>(differ));
    return differ != 0 || calls == 0;
}
