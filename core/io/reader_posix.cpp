// Reads by a few threads, each with one blocking read at a time.
//
// The owner puts requests into a ring of `depth` places; a place is taken until its read is finished, so submit()
// blocks when `depth` reads are unfinished. The threads read with File::read(), and its IoError becomes the request's
// error.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "io/reader.h"

namespace hotrow {
namespace {

constexpr int kMostThreads = 16;

int read_one(const ReadRequest& request) {
  try {
    request.file->read(request.offset, request.into, request.bytes);
    return 0;
  } catch (const IoError& error) {
    return error.code() == 0 ? -1 : error.code();
  } catch (...) {
    return EIO;
  }
}

class PosixReader : public Reader {
 public:
  explicit PosixReader(int depth) : ring_(static_cast<size_t>(depth)) {
    for (int i = 0; i < std::min(depth, kMostThreads); ++i) {
      try {
        threads_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {
        if (threads_.empty()) throw;
        return;  // fewer threads are enough
      }
    }
  }

  ~PosixReader() override {
    wait();
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    queued_more_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const char* name() const override { return "posix"; }
  int depth() const override { return static_cast<int>(ring_.size()); }

  void submit(ReadRequest* requests, size_t count) override {
    std::unique_lock lock(mutex_);
    for (size_t next = 0; next < count;) {
      wait_until_at_most(ring_.size() - 1, lock);
      const size_t part = std::min(count - next, ring_.size() - unfinished_);
      for (size_t i = 0; i < part; ++i) ring_[(first_ + queued_ + i) % ring_.size()] = &requests[next + i];
      queued_ += part;
      unfinished_ += part;
      next += part;
      part == 1 ? queued_more_.notify_one() : queued_more_.notify_all();
    }
  }

  void wait() override {
    std::unique_lock lock(mutex_);
    wait_until_at_most(0, lock);
  }

 private:
  // The threads compare with this number, so that they wake the owner once and not after every read.
  void wait_until_at_most(size_t unfinished, std::unique_lock<std::mutex>& lock) {
    wanted_ = unfinished;
    finished_enough_.wait(lock, [&] { return unfinished_ <= wanted_; });
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      queued_more_.wait(lock, [&] { return stopping_ || queued_ > 0; });
      if (queued_ == 0) return;
      ReadRequest& request = *ring_[first_];
      first_ = (first_ + 1) % ring_.size();
      --queued_;
      lock.unlock();
      request.error = read_one(request);
      lock.lock();
      if (--unfinished_ <= wanted_) finished_enough_.notify_one();
    }
  }

  std::mutex mutex_;  // guards all members below except the threads
  std::condition_variable queued_more_, finished_enough_;
  std::vector<ReadRequest*> ring_;  // queued_ of them from first_ on
  size_t first_ = 0, queued_ = 0;
  size_t unfinished_ = 0;  // queued or being read; at most the ring's size
  size_t wanted_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Reader> open_posix_reader(int depth) { return std::make_unique<PosixReader>(depth); }

}  // namespace hotrow
