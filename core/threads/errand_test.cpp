#include "threads/errand.h"

#include <atomic>
#include <deque>
#include <stdexcept>
#include <thread>

#include "testing/test.h"

namespace hotrow {
namespace {

TEST(an_errand_is_done_once_whoever_does_it) {
  int done = 0;  // no atomic: finish() orders
  Errand errand;
  for (int i = 0; i < 2000; ++i) {
    errand.start([&] { ++done; });
    if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    errand.finish();
    CHECK(!errand.started());
  }
  CHECK_EQ(done, 2000);
}

TEST(an_errand_that_throws_tells_its_owner_and_can_be_started_again) {
  Errand errand;
  for (int i = 0; i < 100; ++i) {
    errand.start([] { throw std::runtime_error("no"); });
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    CHECK_THROWS(std::runtime_error, errand.finish());
    errand.start([] {});
    errand.finish();
  }
}

TEST(an_owner_does_not_wait_behind_the_errands_of_others) {
  std::atomic<bool> begun{false}, go{false};
  Errand slow;
  slow.start([&] {
    begun = true;
    while (!go) std::this_thread::yield();
  });
  while (!begun) std::this_thread::yield();
  std::deque<Errand> queued(5);
  int done = 0;
  for (Errand& errand : queued) errand.start([&] { ++done; });
  for (size_t i : {4, 0, 2}) queued[i].finish();  // the end, the front and the middle of the queue
  CHECK_EQ(done, 3);
  queued.clear();  // the others are never done
  Errand last;
  last.start([&] { done += 10; });
  go = true;
  slow.finish();
  last.finish();
  CHECK_EQ(done, 13);
}

TEST(an_errand_is_over_before_its_owner_is_gone) {
  for (int i = 0; i < 300; ++i) {
    std::atomic<int> inside{0};
    {
      Errand errand;
      errand.start([&] {
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
