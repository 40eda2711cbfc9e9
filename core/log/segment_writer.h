// The segment that is being written: the records that are not in its file yet, and the file.
//
// Blocks gather in one half of an aligned buffer. A full half sets out for the file, as one direct write of whole
// blocks, in the background (errand.h); meanwhile the other half fills. Nothing is forgotten before it has arrived: a
// half is used again only after its write went well. So a failed or torn write costs nothing: whoever next needs the
// room writes the same bytes to the same offset again, and is told when that fails too. The last, partly filled block
// is written by write() alone, and its records stay here until the file is synced and closed.
//
// One write at a time: two on their way were 1.1 times as fast as one on the virtual disk of a 2-core EPYC, and half of
// a buffer of 1 MiB as fast as all of it.
//
// Threads: the mutex is the owner's. The caller holds it for append, find, begin and end; make_room and write take it
// themselves, for moments, on the one thread that also appends. Beside them others may find() and copy records, which
// nobody touches.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "log/aligned.h"
#include "log/segment.h"
#include "threads/errand.h"

namespace hotrow {

class SegmentWriter {
 public:
  // At least one block in each half.
  SegmentWriter(const Geometry& geometry, size_t buffer_bytes, std::mutex& mutex);

  // Starts a new segment. The file is made by the first write. Requires: write() went well, or there was no segment.
  void begin(const SegmentId& id, std::string path);
  void end();  // no segment; the file is closed when its last reader lets it go

  // Records that can be appended before make_room() must be called.
  uint32_t room() const { return most_buffered_ - buffered_; }
  // Requires: room().
  void append(const RecordHead& head, const void* values);
  uint32_t records() const { return written_ + leaving_ + buffered_; }
  uint32_t written() const { return written_; }  // records of blocks that are in the file for good
  // The record's bytes. Requires: written() <= record < records().
  const char* find(uint32_t record) const;
  // For reads of written records. Null before the first write.
  const std::shared_ptr<File>& file() const { return file_; }

  // The full half sets out, once the one before has arrived. Both calls return the bytes that have arrived since the
  // last. Both throw IoError: nothing is lost, try again. Requires: no room().
  uint64_t make_room();
  // Everything is in the file, with the header when it is the first time.
  uint64_t write();

  size_t ram_bytes() const { return buffer_bytes_; }

 private:
  char* block(int half, uint32_t index) const {
    return buffer_.get() + kSegmentHeadBytes + half * half_bytes_ + size_t{index} * geometry_.block_bytes;
  }
  uint64_t finish_leaving();
  uint64_t write_half(int half, uint32_t from, uint32_t records);

  Geometry geometry_;
  std::mutex& mutex_;
  uint32_t most_buffered_;  // records of one half
  size_t half_bytes_, buffer_bytes_;
  Aligned buffer_;  // the header, then the halves, of which the first is a segment's first
  std::string path_;
  uint64_t seed_ = 0;
  std::shared_ptr<File> file_;
  uint32_t written_ = 0, leaving_ = 0, buffered_ = 0;  // records, in this order
  int filling_ = 0;                                    // the half
  Errand leave_;                                       // last: it goes before what it uses
};

}  // namespace hotrow
