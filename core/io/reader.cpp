// Chooses the reader: io_uring, unless the environment, a test's faults or the kernel rule it out.
#include "io/reader.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace hotrow {
namespace {

bool posix_requested() {
  const char* value = std::getenv("HOTROW_IO");
  const std::string choice = value ? value : "";
  if (choice == "posix") return true;
  if (choice.empty() || choice == "io_uring") return false;
  throw std::invalid_argument("HOTROW_IO is '" + choice + "'; set it to io_uring or posix, or unset it");
}

}  // namespace

std::unique_ptr<Reader> open_reader(int depth) {
  if (depth < 1) throw std::invalid_argument("a reader of depth " + std::to_string(depth) + "; pass 1 or more");
  depth = std::min(depth, kMostDepth);
  if (!posix_requested() && files().supports_descriptor_reads())
    if (auto reader = open_uring_reader(depth)) return reader;
  return open_posix_reader(depth);
}

}  // namespace hotrow
