// Where to resume a read or write that moved only part of its bytes.
//
// Direct I/O needs aligned offsets, addresses and sizes, so the rest cannot start at any byte. It starts at the last
// block boundary that was passed and moves a few bytes twice. For the same reason the end of a file is found by its
// size: some file systems answer a read at an unaligned offset with EINVAL.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>

#include "io/files.h"

namespace hotrow {

// How many bytes of a transfer at `offset` to count as done, after it had moved `before` and now `done`. More than
// `before`, so there is always progress. Requires: before < done.
inline size_t retry_offset(uint64_t offset, size_t before, size_t done) {
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
