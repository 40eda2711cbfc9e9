// The segment that is being written: the blocks that are not in its file yet, and the file.
//
// Blocks gather in one aligned buffer and leave it together, in one direct write of whole blocks. write() does not
// forget anything: only advance(), after a write that went well, makes room. So a failed or torn write costs nothing,
// the same bytes (and those that came since) are written to the same offset again. That holds for the last, partly
// filled block of seal() too: until the file is synced and closed, its records are here.
//
// Threads: the owner's lock is held for append, find, advance, begin and end. write() runs without it, on the one
// thread that also appends: beside it others may find() and copy records, which it does not touch.
#pragma once

#include <memory>
#include <string>

#include "log/aligned.h"
#include "log/segment.h"

namespace hotrow {

class SegmentWriter {
 public:
  // At least one block is buffered.
  SegmentWriter(const Geometry& geometry, size_t buffer_bytes);

  // Starts a new segment. The file is made by the first write().
  void begin(const SegmentId& id, std::string path);
  void end();  // no segment; the file is closed when its last reader lets it go

  bool has_room() const { return buffered_ < most_buffered_; }
  // Requires: has_room().
  void append(const RecordHead& head, const void* values);
  uint32_t records() const { return written_ + buffered_; }
  uint32_t written() const { return written_; }  // records of blocks that are in the file for good
  // The record's bytes. Requires: written() <= record < records().
  const char* find(uint32_t record) const;
  // For reads of written records. Null before the first write.
  const std::shared_ptr<File>& file() const { return file_; }

  // Writes what is buffered, with the header when it is the first time. Returns the bytes. Throws IoError: try again.
  uint64_t write();
  // What is buffered is in the file. Requires: write() went well, and all buffered blocks are full.
  void advance();

  size_t ram_bytes() const { return buffer_bytes_; }

 private:
  char* block(uint32_t index) const {
    return buffer_.get() + kSegmentHeadBytes + size_t{index} * geometry_.block_bytes;
  }

  Geometry geometry_;
  uint32_t most_buffered_;  // records
  size_t buffer_bytes_;
  Aligned buffer_;  // the header, then blocks
  std::string path_;
  uint64_t seed_ = 0;
  std::shared_ptr<File> file_;
  uint32_t written_ = 0, buffered_ = 0;  // records
};

}  // namespace hotrow
