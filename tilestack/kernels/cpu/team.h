// The threads that share the work of steps: a few loops one after the other, after each of which all of them meet.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

constexpr int MOST_THREADS = 256;
// How long a thread that waits stays awake: longer than a piece of work takes, since to fall asleep and wake takes longer
// than that. Where other processes want the CPU, whom it waits for may have had to give way, and to stay awake takes the CPU
// from that thread too; so after each wait that was too long the next is given up sooner.
constexpr std::chrono::nanoseconds LONGEST_AWAKE{50'000}, SHORTEST_AWAKE{4'000};

inline void pause_spinning() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The threads of all steps.
class Team {
    std::atomic<int64_t> next{0};  // the piece of work that nobody has taken yet
    std::atomic<uint32_t> calls{1};  // how many there were, times 256, and how many threads are in the last one
    std::atomic<uint32_t> arrived{0}, meetings{0};
    uint32_t started = 1;  // threads that there are, the caller among them
    const std::function<void(uint32_t)>* job = nullptr;
    std::mutex busy;

    static void wait_while(std::atomic<uint32_t>& number, uint32_t is) {
        thread_local auto awake = LONGEST_AWAKE;
        const auto ends = std::chrono::steady_clock::now() + awake;
        do {
            for (int tries = 0; tries < 16; tries++, pause_spinning())
                if (number.load() != is) {
                    awake = std::min(2 * awake, LONGEST_AWAKE);
                    return;
                }
        } while (std::chrono::steady_clock::now() < ends);
        awake = std::max(awake / 2, SHORTEST_AWAKE);
        number.wait(is);  // asleep
    }

    // The threads that a call may have, of so many.
    uint32_t start(uint32_t threads) try {
        for (; started < threads; started++) std::thread(&Team::work, this, started, calls.load()).detach();
        return threads;
    } catch (const std::system_error&) {
        return started;
    }

    void work(uint32_t thread, uint32_t seen) {
        for (;;) {
            wait_while(calls, seen);
            seen = calls.load();
            if (thread >= seen % MOST_THREADS) continue;
            (*job)(thread);
            meet();
        }
    }

   public:
    // Calls todo(thread) in so many threads, or in fewer where the system gives no more, and returns when all are through.
    void run(int64_t wanted, const std::function<void(uint32_t)>& todo) {
        std::lock_guard<std::mutex> alone(busy);
        const uint32_t threads = start(wanted < MOST_THREADS ? wanted : MOST_THREADS - 1);
        job = &todo;
        calls.store((calls.load() / MOST_THREADS + 1) * MOST_THREADS + threads);
        calls.notify_all();
        todo(0);
        meet();
    }

    // All threads are here before one goes on.
    void meet() {
        // How many come is read before this one has: from then on the call may end, and the next one may have fewer.
        const uint32_t now = meetings.load(), threads = calls.load() % MOST_THREADS;
        if (arrived.fetch_add(1) + 1 < threads) return wait_while(meetings, now);
        arrived.store(0);
        next.store(0);
        meetings.store(now + 1);
        meetings.notify_all();
    }

    // Calls body(first, last) for pieces of [0, count), each by the thread that comes first; then all meet.
    template <class Body>
    void share(int64_t count, int64_t piece, Body body) {
        for (int64_t first; (first = next.fetch_add(1) * piece) < count;)
            body(first, first + piece < count ? first + piece : count);
        meet();
    }
};

Team& team = *new Team;  // never destroyed: its threads live as long as the process

// A fork has none of its parent's threads, and what these were in the middle of stays so.
[[maybe_unused]] const int anew_in_a_fork = pthread_atfork(nullptr, nullptr, [] { new (&team) Team; });

}  // namespace
