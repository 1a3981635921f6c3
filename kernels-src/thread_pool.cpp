// A thread that calls takes part itself, so it never waits for others that get no core: the more of the work is left,
// the more it does alone. Idle threads sleep. A forked child has none of its parent's threads and begins anew.

#include "thread_pool.hpp"

#include "common.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

namespace gossamer {
namespace {

thread_local int64_t t_threads = 1;

// One call's work. Lives on the caller's stack until `done` is `count`; all fields are the pool's lock's.
struct Job {
    void (*work)(void*, int64_t);
    void* what;
    int64_t count;
    int64_t helpers;  // that may still join
    int64_t next = 0, done = 0;
    std::condition_variable over;
};

// No helper is to be interrupted by a signal that the program's own threads wait for.
class SignalsBlocked {
  public:
#if defined(_WIN32)
#else
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
#endif
};

class Pool {
  public:
    void run(Job& job) {
        std::unique_lock<std::mutex> lock(mutex_);
        grow(job.helpers);
        jobs_.push_back(&job);
        const int64_t wanted = std::min(job.helpers, job.count - 1);
        for (int64_t i = 0; i < wanted; i++) arrived_.notify_one();
        take_part(job, lock);
        job.over.wait(lock, [&] { return job.done == job.count; });
    }

    // What is under way is finished; later calls work alone.
    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        arrived_.notify_all();
        for (std::thread& helper : helpers_) helper.join();
    }

  private:
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<Job*> jobs_;  // that have parts left
    std::vector<std::thread> helpers_;
    bool ending_ = false;

    // Where no more threads are to be had, fewer share the work.
    void grow(int64_t wanted) {
        const SignalsBlocked blocked;
        try {
            while (!ending_ && static_cast<int64_t>(helpers_.size()) < wanted) helpers_.emplace_back([this] { help(); });
        } catch (const std::system_error&) {
        }
    }

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->helpers > 0; });
            if (open != jobs_.end()) {
                (*open)->helpers--;
                take_part(**open, lock);
            } else if (ending_) {
                return;
            } else {
                arrived_.wait(lock);
            }
        }
    }

    void take_part(Job& job, std::unique_lock<std::mutex>& lock) {
        while (job.next < job.count) {
            const int64_t part = job.next++;
            if (job.next == job.count) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
            lock.unlock();
            job.work(job.what, part);
            lock.lock();
            if (++job.done == job.count) return job.over.notify_one();  // the job may be gone once the lock is
        }
    }
};

// Never deleted: another thread may still be within it when the process ends, and in a child it is a ruin.
std::atomic<Pool*> g_pool{nullptr};

Pool& pool() {
    Pool* found = g_pool.load();
    if (found) return *found;
    Pool* made = new Pool;
    if (g_pool.compare_exchange_strong(found, made)) {
#if !defined(_WIN32)
        static const int registered = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });
        static_cast<void>(registered);
#endif
        return *made;
    }
    delete made;
    return *found;
}

struct AtExit {
    ~AtExit() {
        if (Pool* left = g_pool.load()) left->end();
    }
} g_at_exit;

}  // namespace

int64_t threads() { return t_threads; }

void run_shared(int64_t count, void (*work)(void*, int64_t), void* what) {
    if (t_threads == 1 || count <= 1) {
        for (int64_t part = 0; part < count; part++) work(what, part);
        return;
    }
    Job job{work, what, count, t_threads - 1, 0, 0, {}};
    pool().run(job);
}

}  // namespace gossamer

// How many threads work on what the calling thread calls from now on, itself included; answers how many did before.
GOSSAMER_EXPORT int64_t gossamer_use_threads(int64_t count) {
    const int64_t before = gossamer::t_threads;
    gossamer::t_threads = std::max<int64_t>(count, 1);
    return before;
}
