// A segment file alone, from front to back, without a manifest that says which of its records count: for looking into
// the folder of a log that has ended, or that is at work.
//
// Blocks that do not fit their checksum are passed over and remembered; nothing of them is handed out. Which of them
// are damage and which are the end of a write that a crash cut short is for the caller to say, who knows whether the
// segment was sealed. Nothing is ever written, and the page cache is left alone.
//
// Threads: one at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "log/aligned.h"
#include "log/segment.h"

namespace hotrow {

class SegmentScan {
 public:
  explicit SegmentScan(const std::string& path);  // throws CorruptFile for what has no good header, and IoError

  const SegmentId& id() const { return head_.id; }
  const Geometry& geometry() const { return head_.geometry; }
  uint64_t bytes() const { return bytes_; }                  // of the file when it was opened; no more is read
  uint64_t blocks() const { return blocks_; }                // whole ones
  uint64_t position() const { return next_; }                // blocks that were looked at
  const std::vector<uint32_t>& bad() const { return bad_; }  // those of them that do not fit

  // The next good records: heads, values [n, row_bytes] and their numbers. Returns how many; 0 at the end.
  size_t next(std::vector<RecordHead>& heads, std::vector<char>& values, std::vector<uint32_t>& numbers);

 private:
  bool fits(uint32_t block, const char* bytes) const;

  std::unique_ptr<File> file_;
  SegmentHead head_;
  uint64_t seed_ = 0, bytes_ = 0, blocks_ = 0, next_ = 0;
  size_t buffered_ = 1;  // blocks that are read at a time
  Aligned buffer_;
  std::vector<uint32_t> bad_;
};

}  // namespace hotrow
