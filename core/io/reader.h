// Many reads in flight at once: submitted together, completed in any order.
//
// Uses io_uring where the kernel allows it (by system calls, without a library), otherwise a few threads with pread.
// HOTROW_IO=posix in the environment forces the threads. Both return the same bytes. If files() does not support
// descriptor reads (a test injects faults), the threads are used too, because they read through File::read().
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
  int error = 0;  // out: 0, errno, or -1 for an unexpected end of file
};

class Reader {
 public:
  virtual ~Reader() = default;
  virtual const char* name() const = 0;  // "io_uring" or "posix"
  virtual int depth() const = 0;
  // Starts reads; blocks only while the queue is full. The caller owns the requests and keeps them until they are
  // finished. Read errors are not thrown: check each request's error after wait().
  virtual void submit(ReadRequest* requests, size_t count) = 0;
  // Waits until every read submitted so far is finished.
  virtual void wait() = 0;
};

inline constexpr int kMostDepth = 4096;  // a larger depth is taken as this

std::unique_ptr<Reader> open_reader(int depth = 128);
// The two implementations. open_uring_reader returns null if the kernel has no io_uring or refuses it.
std::unique_ptr<Reader> open_uring_reader(int depth);
std::unique_ptr<Reader> open_posix_reader(int depth);

}  // namespace hotrow
