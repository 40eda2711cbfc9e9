// Writes the open segment: buffers its newest records and writes full blocks to the file.
//
// The aligned buffer has two halves. When one is full, a background task (background_task.h) writes it as one direct
// write of whole blocks, while appends fill the other half. A half is reused only after its write has succeeded. So a
// failed or torn write loses nothing: the next caller that needs the half writes the same bytes to the same offset
// again, and gets the error if that fails too. Only write() writes the last, partly filled block; its records stay in
// the buffer until the file is synced and closed.
//
// One write in flight: two were 1.1 times as fast on the virtual disk of a 2-core EPYC, and half of a 1 MiB buffer was
// as fast as the whole.
//
// Threads: `mutex` is the log's. The caller holds it for append, find, begin and end. flush_full_half and write take it
// briefly themselves and must run on the thread that appends. Other threads may call find() and copy records meanwhile.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "io/aligned_memory.h"
#include "segment/segment.h"
#include "threads/background_task.h"

namespace hotrow {

class SegmentWriter {
 public:
  // At least one block in each half.
  SegmentWriter(const Geometry& geometry, size_t buffer_bytes, std::mutex& mutex);

  // Starts a new segment. The first write creates the file. Requires: the last write() succeeded, or there was no
  // segment.
  void begin(const SegmentId& id, std::string path);
  void end();  // ends the segment; the file is closed when its last reader releases it

  // Records that can be appended before flush_full_half() must be called.
  uint32_t room() const { return most_buffered_ - buffered_; }
  // Requires: room().
  void append(const RecordHead& head, const void* values);
  uint32_t records() const { return written_ + writing_ + buffered_; }
  uint32_t written() const { return written_; }  // records that are in the file
  // The record's bytes. Requires: written() <= record < records().
  const char* find(uint32_t record) const;
  // For reads of written records. Null before the first write.
  const std::shared_ptr<File>& file() const { return file_; }

  // Starts writing the full half, after the write of the other half has finished. Returns the bytes written since the
  // last call of either. Throws IoError: nothing is lost, call again. Requires: room() == 0.
  uint64_t flush_full_half();
  // Writes everything, with the header the first time. Returns and throws as above.
  uint64_t write();

  size_t ram_bytes() const { return buffer_bytes_; }

 private:
  char* block(int half, uint32_t index) const {
    return buffer_.get() + kSegmentHeadBytes + half * half_bytes_ + size_t{index} * geometry_.block_bytes;
  }
  uint64_t finish_write();
  uint64_t write_half(int half, uint32_t from, uint32_t records);

  Geometry geometry_;
  std::mutex& mutex_;
  uint32_t most_buffered_;  // records of one half
  size_t half_bytes_, buffer_bytes_;
  Aligned buffer_;  // the header, then the two halves
  std::string path_;
  uint64_t seed_ = 0;
  std::shared_ptr<File> file_;
  uint32_t written_ = 0, writing_ = 0, buffered_ = 0;  // records, in this order
  int filling_ = 0;                                    // the half that appends fill
  BackgroundTask write_task_;                          // last member: destroyed before what it uses
};

}  // namespace hotrow
