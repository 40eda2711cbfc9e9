// Scans one segment file from front to back, without a manifest that says which records are live. For inspecting the
// folder of a log that has ended or is still running.
//
// Blocks with a wrong checksum are skipped and listed; none of their records is returned. Such a block is damage, or
// the end of a write that a crash cut short: the caller decides, because it knows whether the segment was sealed. The
// scan writes nothing and bypasses the page cache.
//
// Threads: one at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/aligned_memory.h"
#include "segment/segment.h"

namespace hotrow {

class SegmentScan {
 public:
  explicit SegmentScan(const std::string& path);  // throws CorruptFile for a bad header, and IoError

  const SegmentId& id() const { return head_.id; }
  const Geometry& geometry() const { return head_.geometry; }
  uint64_t bytes() const { return bytes_; }                  // file size when it was opened; no more is read
  uint64_t blocks() const { return blocks_; }                // whole blocks in it
  uint64_t position() const { return next_; }                // blocks read so far
  const std::vector<uint32_t>& bad() const { return bad_; }  // of them with a wrong checksum

  // The next good records: heads, values [n, row_bytes] and their numbers. Returns how many; 0 at the end.
  size_t next(std::vector<RecordHead>& heads, std::vector<char>& values, std::vector<uint32_t>& numbers);

 private:
  bool is_intact(uint32_t block, const char* bytes) const;

  std::unique_ptr<File> file_;
  SegmentHead head_;
  uint64_t seed_ = 0, bytes_ = 0, blocks_ = 0, next_ = 0;
  size_t buffered_ = 1;  // blocks that are read at a time
  Aligned buffer_;
  std::vector<uint32_t> bad_;
};

}  // namespace hotrow
