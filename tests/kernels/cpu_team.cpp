// Teams (tilestack/kernels/cpu/team.h) under the worst of schedules: now and then a thread stops for a while after it has
// touched a number that threads share. Exits with the number of runs that were wrong; a run that never ends is worse.

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

void stop_now_and_then() {
    thread_local uint32_t state = std::hash<std::thread::id>()(std::this_thread::get_id()) | 1;
    state = state * 1664525 + 1013904223;
    if (state >> 24 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

namespace std {
template <class Number>
struct interrupted_atomic : atomic<Number> {
    using atomic<Number>::atomic;
    Number load() const {
        const Number found = atomic<Number>::load();
        stop_now_and_then();
        return found;
    }
    void store(Number value) { atomic<Number>::store(value), stop_now_and_then(); }
    Number fetch_add(Number more) {
        const Number before = atomic<Number>::fetch_add(more);
        stop_now_and_then();
        return before;
    }
};
}  // namespace std

#define atomic interrupted_atomic
#include "team.h"
#undef atomic

constexpr int64_t COUNT = 97;

// Loops that read what the ones before have written: true if every piece was done once and after all that it needs.
bool run(int64_t threads) {
    std::vector<int> ones(COUNT), sums(COUNT);
    team.run(threads, [&](uint32_t) {
        for (int round = 0; round < 4; round++) {
            team.share(COUNT, 4, [&](int64_t first, int64_t last) {
                for (; first < last; first++) ones[first]++;
            });
            team.share(COUNT, 32, [&](int64_t first, int64_t last) {
                for (; first < last; first++) sums[first] += ones[COUNT - 1 - first];
            });
        }
    });
    return std::all_of(ones.begin(), ones.end(), [](int one) { return one == 4; }) &&
           std::all_of(sums.begin(), sums.end(), [](int sum) { return sum == 10; });
}

int runs(int64_t threads, int times) {
    int wrong = 0;
    while (times--) wrong += !run(threads);
    return wrong;
}

int several_callers() {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int64_t threads : {1, 2, 5}) callers.emplace_back([&wrong, threads] { wrong += runs(threads, 150); });
    for (auto& caller : callers) caller.join();
    return wrong;
}

int forks() {
    std::atomic<int> wrong{0};
    std::atomic<bool> ends{false};
    std::thread beside([&] {
        while (!ends) wrong += !run(3);
    });
    for (int times = 0; times < 10; times++) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        if (const pid_t child = fork()) {
            int status;
            waitpid(child, &status, 0);
            wrong += status != 0;
        } else {
            alarm(200);
            _exit(runs(2, 5));
        }
    }
    ends = true;
    beside.join();
    return wrong;
}

int no_more_threads() {
    const rlimit few{1 << 26, 1 << 26};  // of bytes, of which the stack of a thread takes 8 million
    setrlimit(RLIMIT_AS, &few);
    return runs(200, 5);
}

// More than a call can have: machines have as many, and PyTorch asks for them all.
int hundreds_of_threads() { return runs(300, 2) + runs(256, 2) + runs(3, 2); }

int main(int, char** named) {
    if (!strcmp(named[1], "callers")) return several_callers();
    if (!strcmp(named[1], "forks")) return forks();
    if (!strcmp(named[1], "hundreds")) return hundreds_of_threads();
    return no_more_threads();
}
