// Memory for direct I/O: its address is a multiple of kIoAlign.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "io/files.h"

namespace hotrow {

struct FreeAligned {
  void operator()(char* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<char[], FreeAligned>;

// Requires: bytes is a multiple of kIoAlign. Not cleared.
inline Aligned allocate_aligned(size_t bytes) {
  char* const memory = static_cast<char*>(std::aligned_alloc(kIoAlign, bytes));
  if (!memory) throw std::bad_alloc();
  return Aligned(memory);
}

}  // namespace hotrow
