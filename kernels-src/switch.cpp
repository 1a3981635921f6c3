// gossamer-switch: the network between network namespaces of one machine.
//
// Every host is a namespace with a TUN device; this program reads what the hosts send and hands it on when a real
// network would: each host has a line with a rate up and down, each pair of hosts a delay, jitter and loss.
//
// Lines of text come in on standard input, and each is answered by one line; the end of the input ends the program.
//   offload 0|1                                   whether hosts may send segments joined into large packets
//   seed NUMBER                                   of loss and jitter
//   host NAMESPACE_PATH UP_BITS DOWN_BITS QUEUE_BYTES      the next host, counted from 0
//   path FROM TO SECONDS JITTER_SECONDS LOSS      one direction of a pair
//   shared BITS QUEUE_BYTES                       the next line that several pairs share, counted from 0
//   through FROM TO LINE                          one direction of a pair shares this line
//   open                                          make the devices and begin
//   cut A B | heal A B                            lose everything between two hosts, both ways
//   rate HOST UP_BITS DOWN_BITS
//   stats                                         one line of JSON
//
// A packet goes through three moments: it leaves the sender's line, its first bit reaches the receiver's line, its last
// bit has passed that line. Where its way is shared, its first bit reaches the shared line before it travels.
// Lines are cut-through: an idle one adds no second serialisation.

#include "packets.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <queue>
#include <sstream>
#include <stdexcept>

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

using namespace gossamer;

namespace {

constexpr const char* kInterface = "eth0";
constexpr int kVersion = 2;
constexpr int kPacketsPerTurn = 64;
// A wake-up costs more than these: what is due so soon is delivered now.
constexpr Nanoseconds kEarly = 20'000;
#ifndef TUN_F_USO4
constexpr unsigned kJoinedDatagrams = 0x20 | 0x40;
#else
constexpr unsigned kJoinedDatagrams = TUN_F_USO4 | TUN_F_USO6;
#endif

Nanoseconds now() {
    timespec at{};
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

[[noreturn]] void fail(const std::string& what) {
    throw std::runtime_error(what + ": " + std::strerror(errno));
}

void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

class Switch {
  public:
    void add_host(const std::string& space, double up, double down, double queue_bytes) {
        require(paths_.empty(), "hosts come before their paths");
        require_line(std::min(up, down), queue_bytes);
        Host host;
        host.space = space;
        host.up.set_rate(up);
        host.down.set_rate(down);
        host.up.queue_bytes = host.down.queue_bytes = queue_bytes;
        hosts_.push_back(host);
    }

    void set_path(size_t from, size_t to, double seconds, double jitter, double loss) {
        prepare();
        require(seconds >= 0 && jitter >= 0 && loss >= 0 && loss < 1, "no such path");
        Path& path = at(from, to);
        path.delay = static_cast<Nanoseconds>(seconds * 1e9);
        path.jitter_nanoseconds = jitter * 1e9;
        path.loss = loss;
    }

    void add_shared(double rate, double queue_bytes) {
        require_line(rate, queue_bytes);
        Line line;
        line.set_rate(rate);
        line.queue_bytes = queue_bytes;
        shared_.push_back(line);
    }

    void set_through(size_t from, size_t to, size_t line) {
        prepare();
        require(line < shared_.size(), "no such line");
        at(from, to).shared = line;
    }

    void set_cut(size_t a, size_t b, bool is_cut) {
        prepare();
        at(a, b).is_cut = at(b, a).is_cut = is_cut;
    }

    void set_rate(size_t host, double up, double down) {
        require(host < hosts_.size(), "no such host");
        require_line(std::min(up, down), 0);
        hosts_[host].up.set_rate(up);
        hosts_[host].down.set_rate(down);
    }

    void open() {
        prepare();
        for (Host& host : hosts_) open_device(host);  // the last one's namespace is as good a place to be as any
    }

    void read_from(size_t from) {
        for (int turn = 0; turn < kPacketsPerTurn; ++turn) {
            const ssize_t stored = read(hosts_[from].device, scratch_, sizeof scratch_);
            if (stored < 0) return;
            if (static_cast<size_t>(stored) >= kHeaderBytes + 20) accept(from, static_cast<size_t>(stored));
        }
    }

    // Hand on what is due; returns when the next is, or -1.
    Nanoseconds work() {
        Nanoseconds time = now();
        while (!events_.empty() && events_.top().at <= time + kEarly) {
            const Event event = events_.top();
            events_.pop();
            switch (event.stage) {
                case Stage::kShares: share(event.packet, event.at); break;
                case Stage::kArrives: arrive(event.packet, event.at); break;
                case Stage::kDelivered: deliver(event.packet, event.at, time), time = now();
            }
        }
        return events_.empty() ? -1 : events_.top().at;
    }

    std::string stats() const {
        rusage usage{};
        getrusage(RUSAGE_SELF, &usage);
        const auto seconds = [](timeval t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
        std::ostringstream out;
        out.precision(9);
        out << "{\"cpu_seconds\": " << seconds(usage.ru_utime) + seconds(usage.ru_stime)
            << ", \"packets\": " << counts_.packets << ", \"bytes\": " << counts_.bytes
            << ", \"dropped_full\": " << counts_.full << ", \"dropped_lost\": " << counts_.lost
            << ", \"dropped_cut\": " << counts_.cut << ", \"late_seconds\": "
            << counts_.late_seconds / static_cast<double>(std::max<uint64_t>(counts_.packets, 1)) << "}";
        return out.str();
    }

    void set_seed(uint64_t seed) { seed_ = seed; }
    void set_offload(bool offload) { offload_ = offload; }
    const std::vector<Host>& hosts() const { return hosts_; }

  private:
    static void require_line(double rate, double queue_bytes) {
        require(rate > 0 && queue_bytes >= 0, "a line has a rate above 0, and room for no less than 0 bytes");
    }

    void prepare() {
        if (!paths_.empty()) return;
        const size_t count = hosts_.size();
        paths_.resize(count * count);
        for (size_t pair = 0; pair < paths_.size(); ++pair) {
            paths_[pair].lots.seed(seed_ * 0x9E3779B97F4A7C15ULL + 2 * pair);
            paths_[pair].swings.seed(seed_ * 0x9E3779B97F4A7C15ULL + 2 * pair + 1);
        }
    }

    Path& at(size_t from, size_t to) {
        require(from < hosts_.size() && to < hosts_.size(), "no such host");
        return paths_.at(from * hosts_.size() + to);
    }

    void open_device(Host& host) const {
        const int space = ::open(host.space.c_str(), O_RDONLY | O_CLOEXEC);
        if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail(host.space);
        close(space);
        host.device = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (host.device < 0) fail("/dev/net/tun");
        ifreq request{};
        std::strncpy(request.ifr_name, kInterface, IFNAMSIZ - 1);
        request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
        if (ioctl(host.device, TUNSETIFF, &request) != 0) fail("a TUN device");
        // Older kernels know no joined datagrams
        const unsigned joined = offload_ ? TUN_F_TSO4 : 0U;
        if (ioctl(host.device, TUNSETOFFLOAD, TUN_F_CSUM | joined | (offload_ ? kJoinedDatagrams : 0U)) != 0 &&
            ioctl(host.device, TUNSETOFFLOAD, TUN_F_CSUM | joined) != 0)
            fail("TUN offloads");
    }

    // The last byte of an address, less one, is the host's number.
    void accept(size_t from, size_t stored) {
        const unsigned char* ip = scratch_ + kHeaderBytes;
        const size_t to = static_cast<size_t>(ip[19]) - 1;
        if (ip[0] >> 4 != 4 || ip[16] != 10 || ip[17] != 77 || to >= hosts_.size()) return;
        const uint32_t bytes = wire_bytes(scratch_, stored);
        const Nanoseconds time = now();
        Line& line = hosts_[from].up;
        Path& path = at(from, to);
        if (line.is_full(time)) return void(++counts_.full);
        const Nanoseconds begins = std::max(time, line.free_at);
        line.free_at = begins + line.takes(bytes);
        if (path.is_cut) return void(++counts_.cut);
        if (path.loss > 0 && std::uniform_real_distribution<>()(path.lots) < path.loss) return void(++counts_.lost);

        Packet* packet = pool_.take(stored);
        std::memcpy(packet->data, scratch_, stored);
        packet->stored_bytes = static_cast<uint32_t>(stored);
        packet->wire_bytes = bytes;
        packet->from = static_cast<uint16_t>(from);
        packet->to = static_cast<uint16_t>(to);
        packet->delay = delay(path);
        packet->last_bit = line.free_at;
        if (path.shared == kUnshared) return travel(packet, begins);
        events_.push({begins, order_++, packet, Stage::kShares});
    }

    // A packet that comes slowly does not keep the line from others: only its own bits do.
    void share(Packet* packet, Nanoseconds first_bit) {
        Line& line = shared_[at(packet->from, packet->to).shared];
        if (line.is_full(first_bit)) return ++counts_.full, pool_.give(packet);
        const Nanoseconds begins = std::max(first_bit, line.free_at);
        line.free_at = begins + line.takes(packet->wire_bytes);
        packet->last_bit = std::max(line.free_at, packet->last_bit);
        travel(packet, begins);
    }

    // From the line whose first bit it left at `begins` to the receiver's.
    void travel(Packet* packet, Nanoseconds begins) {
        Path& path = at(packet->from, packet->to);
        const Nanoseconds first_bit = std::max(begins + packet->delay, path.last_arrival);
        path.last_arrival = first_bit;
        packet->last_bit += first_bit - begins;
        events_.push({first_bit, order_++, packet, Stage::kArrives});
    }

    static Nanoseconds delay(Path& path) {
        if (path.jitter_nanoseconds == 0) return path.delay;
        const double swing = std::normal_distribution<>(0, path.jitter_nanoseconds)(path.swings);
        return std::max<Nanoseconds>(0, path.delay + static_cast<Nanoseconds>(swing));
    }

    void arrive(Packet* packet, Nanoseconds first_bit) {
        Line& line = hosts_[packet->to].down;
        const bool is_cut = at(packet->from, packet->to).is_cut;
        if (is_cut || line.is_full(first_bit)) {
            ++(is_cut ? counts_.cut : counts_.full);
            return pool_.give(packet);
        }
        const Nanoseconds begins = std::max(first_bit, line.free_at);
        line.free_at = std::max(begins + line.takes(packet->wire_bytes), packet->last_bit);
        events_.push({line.free_at, order_++, packet, Stage::kDelivered});
    }

    void deliver(Packet* packet, Nanoseconds due, Nanoseconds time) {
        if (write(hosts_[packet->to].device, packet->data, packet->stored_bytes) < 0) ++counts_.full;
        ++counts_.packets;
        counts_.bytes += packet->wire_bytes;
        counts_.late_seconds += 1e-9 * static_cast<double>(std::max<Nanoseconds>(0, time - due));
        pool_.give(packet);
    }

    std::vector<Host> hosts_;
    std::vector<Path> paths_;
    std::vector<Line> shared_;
    std::priority_queue<Event> events_;
    Pool pool_;
    Counts counts_;
    uint64_t order_ = 0, seed_ = 0;
    bool offload_ = false;
    unsigned char scratch_[kLargestBytes];
};

class Program {
  public:
    void run() {
        poll_ = epoll_create1(EPOLL_CLOEXEC);
        timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        if (poll_ < 0 || timer_ < 0) fail("epoll");
        watch(STDIN_FILENO, kControl);
        watch(timer_, kTimer);
        say("gossamer-switch " + std::to_string(kVersion));
        while (is_wanted_) {
            arm(switch_->work());
            epoll_event ready[64];
            const int count = epoll_wait(poll_, ready, 64, -1);
            for (int each = 0; each < count; ++each) handle(ready[each].data.u64);
        }
    }

  private:
    static constexpr uint64_t kControl = ~0ULL, kTimer = ~0ULL - 1;

    void watch(int file, uint64_t tag) const {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = tag;
        if (epoll_ctl(poll_, EPOLL_CTL_ADD, file, &event) != 0) fail("epoll");
    }

    void arm(Nanoseconds next) {
        if (next == armed_) return;
        armed_ = next;
        itimerspec at{};
        if (next >= 0) at.it_value = {static_cast<time_t>(next / 1'000'000'000), static_cast<long>(next % 1'000'000'000)};
        timerfd_settime(timer_, TFD_TIMER_ABSTIME, &at, nullptr);
    }

    void handle(uint64_t tag) {
        if (tag == kControl) return listen();
        if (tag != kTimer) return switch_->read_from(tag);
        uint64_t expirations;
        if (read(timer_, &expirations, sizeof expirations) > 0) armed_ = -1;
    }

    void listen() {
        char block[4096];
        const ssize_t count = read(STDIN_FILENO, block, sizeof block);
        if (count <= 0) is_wanted_ = false;
        input_.append(block, static_cast<size_t>(std::max<ssize_t>(count, 0)));
        for (size_t end; (end = input_.find('\n')) != std::string::npos; input_.erase(0, end + 1)) {
            try {
                say(obey(input_.substr(0, end)));
            } catch (const std::exception& problem) {
                say(std::string("error ") + problem.what());
            }
        }
    }

    std::string obey(const std::string& line) {
        std::istringstream words(line);
        std::string verb, space;
        size_t a = 0, b = 0, c = 0;
        double x = 0, y = 0, z = 0;
        words >> verb;
        if (verb == "stats") return switch_->stats();
        if (verb == "offload" && words >> a) return switch_->set_offload(a != 0), "ok";
        if (verb == "seed" && words >> a) return switch_->set_seed(a), "ok";
        if (verb == "host" && words >> space >> x >> y >> z) return switch_->add_host(space, x, y, z), "ok";
        if (verb == "path" && words >> a >> b >> x >> y >> z) return switch_->set_path(a, b, x, y, z), "ok";
        if (verb == "shared" && words >> x >> y) return switch_->add_shared(x, y), "ok";
        if (verb == "through" && words >> a >> b >> c) return switch_->set_through(a, b, c), "ok";
        if (verb == "cut" && words >> a >> b) return switch_->set_cut(a, b, true), "ok";
        if (verb == "heal" && words >> a >> b) return switch_->set_cut(a, b, false), "ok";
        if (verb == "rate" && words >> a >> x >> y) return switch_->set_rate(a, x, y), "ok";
        if (verb == "open") return open(), "ok";
        return "error not understood: " + line;
    }

    void open() const {
        switch_->open();
        for (size_t host = 0; host < switch_->hosts().size(); ++host) watch(switch_->hosts()[host].device, host);
        // A network does not slow down because the hosts compute; where this is not allowed, it may.
        sched_param priority{};
        priority.sched_priority = 1;
        sched_setscheduler(0, SCHED_FIFO, &priority);
    }

    static void say(const std::string& line) { std::printf("%s\n", line.c_str()), std::fflush(stdout); }

    std::unique_ptr<Switch> switch_ = std::make_unique<Switch>();
    std::string input_;
    int poll_ = -1, timer_ = -1;
    Nanoseconds armed_ = -1;
    bool is_wanted_ = true;
};

}  // namespace

int main() {
    try {
        Program().run();
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "gossamer-switch: %s\n", problem.what());
        return 1;
    }
}
