// Many reads at once: submitted together, deep in the queue, finished in any order.
//
// io_uring where the kernel has it and lets us (by its system calls, no library), else a few threads with pread.
// HOTROW_IO=posix in the environment forces the threads. Both give the same bytes. While files() is not plain (a test's
// faults), the threads are used as well, because they read through File::read().
//
// Threads: a Reader belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "io/files.h"

namespace hotrow {

struct ReadRequest {
  const File* file;
  uint64_t offset;
  char* into;
  uint32_t bytes;
  int error = 0;  // out: 0, errno, or -1 for an end of file that came too early
};

class Reader {
 public:
  virtual ~Reader() = default;
  virtual const char* name() const = 0;  // "io_uring" or "posix"
  virtual int depth() const = 0;
  // Starts reads; blocks only while the queue is full. The requests stay the caller's and must live until finished.
  // No read fails by an exception: look at each request's error after wait().
  virtual void submit(ReadRequest* requests, size_t count) = 0;
  // Waits until every read submitted so far is finished.
  virtual void wait() = 0;
};

inline constexpr int kMostDepth = 4096;  // a larger depth is taken as this

std::unique_ptr<Reader> open_reader(int depth = 128);
// The two kinds. io_uring is null where the kernel has none or refuses it.
std::unique_ptr<Reader> open_uring_reader(int depth);
std::unique_ptr<Reader> open_posix_reader(int depth);

}  // namespace hotrow
