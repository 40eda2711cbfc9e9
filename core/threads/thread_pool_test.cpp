#include "threads/thread_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "testing/test.h"

namespace hotrow {
namespace {

// How often each of n tasks ran.
std::vector<int> runs_of(ThreadPool& pool, int tasks) {
  std::vector<std::atomic<int>> runs(tasks);
  pool.run(tasks, [&](int i) { ++runs[i]; });
  return {runs.begin(), runs.end()};
}

TEST(every_task_runs_once_for_any_number_of_threads) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.threads(), threads);
    for (int tasks : {0, 1, 2, 3, 100, 5000}) CHECK(runs_of(pool, tasks) == std::vector<int>(tasks, 1));
  }
}

TEST(what_tasks_wrote_is_there_when_run_returns) {
  ThreadPool pool(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> values(20);  // plain ints: the thread sanitizer checks that run orders the accesses
    pool.run(20, [&](int i) { values[i] = i + round; });
    CHECK_EQ(std::accumulate(values.begin(), values.end(), 0), 190 + 20 * round);
  }
}

TEST(a_task_may_run_tasks_of_its_own) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    std::atomic<int> leaves{0};
    pool.run(5, [&](int) { pool.run(7, [&](int) { pool.run(3, [&](int) { ++leaves; }); }); });
    CHECK_EQ(leaves.load(), 5 * 7 * 3);
  }
}

TEST(an_exception_of_a_task_comes_out_of_run_and_the_pool_goes_on) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      CHECK_THROWS(std::domain_error, pool.run(100, [&](int i) {
        if (i == 37) throw std::domain_error("37");
      }));
      CHECK_THROWS(std::domain_error, pool.run(10, [&](int) { throw std::domain_error("all"); }));
      CHECK(runs_of(pool, 64) == std::vector<int>(64, 1));
    }
  }
}

TEST(an_exception_of_an_inner_run_passes_through_the_outer_one) {
  ThreadPool pool(3);
  CHECK_THROWS(std::domain_error, pool.run(4, [&](int i) {
    pool.run(4, [&](int j) {
      if (i == 2 && j == 3) throw std::domain_error("inner");
    });
  }));
}

TEST(several_callers_share_the_workers) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<int> mine(16);
        pool.run(16, [&](int i) { mine[i] = 1; });
        wrong += std::accumulate(mine.begin(), mine.end(), 0) != 16;
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(the_number_of_threads_can_change_between_runs) {
  ThreadPool pool(1);
  for (int threads : {4, 1, 2, 7, 1, 3}) {
    pool.set_threads(threads);
    CHECK_EQ(pool.threads(), threads);
    CHECK(runs_of(pool, 200) == std::vector<int>(200, 1));
  }
  pool.set_threads(0);
  CHECK_EQ(pool.threads(), 1);
}

TEST(workers_step_back_and_callers_do_not) {
  ThreadPool pool(1);
  const int mine = getpriority(PRIO_PROCESS, 0);
  for (int nice : {5, 0}) {
    pool.set_threads(3, nice);
    std::mutex mutex;
    std::set<int> of_workers;
    std::atomic<int> inside{0};
    pool.run(3, [&](int) {
      ++inside;
      while (inside < 3) std::this_thread::yield();  // each thread has one
      std::lock_guard lock(mutex);
      if (gettid() != getpid()) of_workers.insert(getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())));
    });
    CHECK(of_workers == std::set<int>{std::min(19, mine + nice)});
    CHECK_EQ(getpriority(PRIO_PROCESS, 0), mine);
  }
}

}  // namespace
}  // namespace hotrow
