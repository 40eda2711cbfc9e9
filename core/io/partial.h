// Where a read or write goes on that moved only a part of its bytes.
//
// Direct I/O wants every offset, address and size aligned, so the rest must not start at just any byte: it starts at
// the last block border that was passed, and moves a few bytes twice. For the same reason the end of a file is found by
// its size and not by asking for more at an odd offset, which some file systems answer with EINVAL.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>

#include "io/files.h"

namespace hotrow {

// A transfer at `offset` had moved `before` bytes and has now moved `done`: the number to count as done. More than
// `before`, so that there is always progress. Requires: before < done.
inline size_t resume_at(uint64_t offset, size_t before, size_t done) {
  const size_t past_border = (offset + done) % kIoAlign;
  return done - before > past_border ? done - past_border : done;
}

// Whether a regular file ends at or before `position`.
inline bool ends_before(int descriptor, uint64_t position) {
  struct stat info;
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) return false;
  return static_cast<uint64_t>(info.st_size) <= position;
}

}  // namespace hotrow
