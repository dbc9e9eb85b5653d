// A team of threads that executes one region at a time.
//
// Everything waits on an Event: a counter that its signaller bumps. A waiter spins for a bounded
// time, then sleeps in the kernel on that counter (futex). No wake-up can be lost: a sleeper
// announces itself before the kernel compares the counter once more, and the signaller bumps the
// counter before it looks for announcements (both sequentially consistent).
//
// A region starts when the caller bumps `start`, and ends at a barrier, so no worker can miss one:
// the next cannot start before all have arrived. The barrier's last arriver resets the claims.
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Long enough to cover the imbalance of one kernel and the host's work between two steps, short
// enough that a core is soon free for whoever pushed a thread of the team off it.
constexpr int64_t kBarrierSpinNs = 50'000;
constexpr int64_t kIdleSpinNs = 100'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

struct alignas(64) Event {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> sleepers{0};

  void signal() {
    count.fetch_add(1);
    if (sleepers.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
  }

  // Returns when count differs from `seen`.
  void wait(uint32_t seen, int64_t spin_ns) {
    for (int i = 0; i < 64; i++) {  // the common case needs no clock
      if (count.load(std::memory_order_acquire) != seen) return;
      cpu_relax();
    }
    for (const int64_t until = now_ns() + spin_ns; now_ns() < until;) {
      for (int i = 0; i < 32; i++) {
        if (count.load(std::memory_order_acquire) != seen) return;
        cpu_relax();
      }
    }
    sleepers.fetch_add(1);
    while (count.load() == seen) {
#if defined(__linux__)
      syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
      sched_yield();
#endif
    }
    sleepers.fetch_sub(1);
  }
};

struct Worker {
  pelton_team* team;
  int index;
  pthread_t handle;
};

}  // namespace

struct pelton_team {
  int size = 1;
  int started = 0;  // workers that exist
  pid_t pid = 0;
  Worker* workers = nullptr;
  char* scratch = nullptr;
  pelton_region region = nullptr;  // NULL when `start` is bumped: the workers end
  void* arg = nullptr;
  alignas(64) std::atomic<int> running{0};
  alignas(64) std::atomic<int64_t> claimed{0};
  alignas(64) std::atomic<int> arrived{0};
  std::atomic<bool> failed{false};   // set by any thread at any time
  std::atomic<bool> stopped{false};  // `failed`, as it was at the last barrier: the same for all threads
  Event passed;  // bumped each time all have arrived
  Event start;
};

namespace {

void* work(void* p) {
  Worker* w = static_cast<Worker*>(p);
  pelton_team* team = w->team;
  for (uint32_t seen = 0;; seen++) {
    team->start.wait(seen, kIdleSpinNs);
    if (!team->region) return nullptr;
    team->region(team->arg, team, w->index);
    pelton_barrier(team, w->index);
  }
}

void stop(pelton_team* team) {
  team->region = nullptr;
  team->start.signal();
  for (int i = 0; i < team->started; i++) pthread_join(team->workers[i].handle, nullptr);
}

}  // namespace

extern "C" {

pelton_team* pelton_team_create(int n) {
  if (n < 1) n = 1;
  pelton_team* team = new (std::nothrow) pelton_team;
  if (!team) return nullptr;
  team->size = n;
  team->pid = getpid();
  team->workers = static_cast<Worker*>(calloc((size_t)n, sizeof(Worker)));
  // Touched only by kernels that use it.
  team->scratch = static_cast<char*>(aligned_alloc(64, (size_t)n * PELTON_SCRATCH_BYTES));
  if (!team->workers || !team->scratch) {
    free(team->workers);
    free(team->scratch);
    delete team;
    return nullptr;
  }
  // Workers take no signals: the host program's handlers run in its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < n; i++) {
    Worker* w = &team->workers[team->started];
    w->team = team;
    w->index = i;
    if (pthread_create(&w->handle, nullptr, work, w)) break;
#if defined(__linux__)
    char name[16];
    snprintf(name, sizeof name, "pelton-%d", i % 10000);
    pthread_setname_np(w->handle, name);
#endif
    team->started++;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (team->started != n - 1) {
    pelton_team_destroy(team);
    return nullptr;
  }
  return team;
}

void pelton_team_destroy(pelton_team* team) {
  if (!team) return;
  if (team->pid == getpid()) stop(team);
  free(team->workers);
  free(team->scratch);
  delete team;
}

int pelton_team_size(const pelton_team* team) { return team->size; }

void* pelton_scratch(pelton_team* team, int thread) {
  return team->scratch + (size_t)thread * PELTON_SCRATCH_BYTES;
}

int64_t pelton_claim(pelton_team* team, int64_t n) {
  int64_t i = team->claimed.fetch_add(1, std::memory_order_relaxed);
  return i < n ? i : -1;
}

void pelton_barrier(pelton_team* team, int thread) {
  const uint32_t seen = team->passed.count.load(std::memory_order_relaxed);
  if (team->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team->size) {
    team->arrived.store(0, std::memory_order_relaxed);
    team->claimed.store(0, std::memory_order_relaxed);
    team->stopped.store(team->failed.load(std::memory_order_relaxed), std::memory_order_relaxed);
    team->passed.signal();
  } else {
    team->passed.wait(seen, kBarrierSpinNs);
  }
}

int pelton_team_run(pelton_team* team, pelton_region region, void* arg) {
  if (team->pid != getpid()) return PELTON_ERROR_FORKED;
  if (team->running.exchange(1, std::memory_order_acquire)) return PELTON_ERROR_BUSY;
  team->region = region;
  team->arg = arg;
  team->failed.store(false, std::memory_order_relaxed);
  team->stopped.store(false, std::memory_order_relaxed);
  if (team->size > 1) team->start.signal();
  region(arg, team, 0);
  pelton_barrier(team, 0);
  const bool failed = team->failed.load(std::memory_order_relaxed);
  team->running.store(0, std::memory_order_release);
  return failed ? PELTON_ERROR_HOST : PELTON_OK;
}

}  // extern "C"

void pelton_team_fail(pelton_team* team) { team->failed.store(true, std::memory_order_relaxed); }
bool pelton_team_stopped(const pelton_team* team) { return team->stopped.load(std::memory_order_relaxed); }
