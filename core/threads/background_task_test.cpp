#include "threads/background_task.h"

#include <atomic>
#include <deque>
#include <stdexcept>
#include <thread>

#include "testing/test.h"

namespace hotrow {
namespace {

TEST(a_background_task_runs_once_on_either_thread) {
  int done = 0;  // not atomic: finish() synchronises
  BackgroundTask task;
  for (int i = 0; i < 2000; ++i) {
    task.start([&] { ++done; });
    if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    task.finish();
    CHECK(!task.started());
  }
  CHECK_EQ(done, 2000);
}

TEST(a_task_that_throws_rethrows_in_finish_and_can_be_started_again) {
  BackgroundTask task;
  for (int i = 0; i < 100; ++i) {
    task.start([] { throw std::runtime_error("no"); });
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    CHECK_THROWS(std::runtime_error, task.finish());
    task.start([] {});
    task.finish();
  }
}

TEST(an_owner_does_not_wait_behind_other_owners_tasks) {
  std::atomic<bool> begun{false}, go{false};
  BackgroundTask slow;
  slow.start([&] {
    begun = true;
    while (!go) std::this_thread::yield();
  });
  while (!begun) std::this_thread::yield();
  std::deque<BackgroundTask> queued(5);
  int done = 0;
  for (BackgroundTask& task : queued) task.start([&] { ++done; });
  for (size_t i : {4, 0, 2}) queued[i].finish();  // the end, the front and the middle of the queue
  CHECK_EQ(done, 3);
  queued.clear();  // the other tasks never run
  BackgroundTask last;
  last.start([&] { done += 10; });
  go = true;
  slow.finish();
  last.finish();
  CHECK_EQ(done, 13);
}

TEST(a_task_is_done_before_its_owner_is_destroyed) {
  for (int i = 0; i < 300; ++i) {
    std::atomic<int> inside{0};
    {
      BackgroundTask task;
      task.start([&] {
        ++inside;
        std::this_thread::yield();
        --inside;
      });
      if (i % 2) std::this_thread::yield();
    }
    CHECK_EQ(inside.load(), 0);
  }
}

}  // namespace
}  // namespace hotrow
