// What a Log holds: its segments with their live bits, the one that is being written, and the readers.
//
// The mutex guards the segments and the writer's buffers. It is held for moments only: no file is touched under it. The
// table's writer is the only one to change anything, so it may look without the mutex; readers copy what they need (a
// file, a record from the buffer) under it. A file lives as long as someone reads it, also when its segment is dropped.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "log/log.h"
#include "log/places_reader.h"
#include "log/segment.h"
#include "log/segment_writer.h"

namespace hotrow {

// A sync that failed: the system may have thrown the data away and will not say so again. The log takes no more
// snapshots; what it has can still be read.
class SyncFailed : public IoError {
 public:
  explicit SyncFailed(const IoError& cause)
      : IoError(cause),
        text_(std::string(cause.what()) +
              "; what was written since the last checkpoint may not be on the disk: restart "
              "and resume from that checkpoint") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

struct LogSegment {
  SegmentId id;
  std::string path;
  std::shared_ptr<const File> file;  // of a sealed one
  bool sealed = false;
  uint64_t bytes = 0;  // of a sealed one's file
  uint32_t records = 0;
  uint64_t live = 0;
  std::vector<uint64_t> bits;

  bool alive(uint32_t record) const { return record < records && (bits[record / 64] >> (record % 64) & 1) != 0; }
};

struct Log::State {
  State(const LogOptions& options, const Geometry& geometry);

  Geometry geometry;
  uint32_t most_records;  // in a segment
  uint64_t origin;
  std::string folder, table;

  mutable std::mutex mutex;  // for all below but the readers and the counters
  std::map<uint64_t, LogSegment> segments;
  SegmentWriter writer;
  LogSegment* open = nullptr;  // what the writer writes; has at least one record
  uint64_t next = 0;           // segment number
  int snapshots = 0;           // being taken
  std::optional<SyncFailed> failed;

  std::shared_ptr<PlacesReaders> readers;  // of all logs with such records
  std::atomic<uint64_t> bytes_written{0}, rows_written{0}, bytes_read{0}, blocks_read{0}, rows_read{0},
      compacted_bytes{0};

  // Throws std::out_of_range. Requires: the mutex.
  LogSegment& segment(uint64_t number);
  void begin_segment();
  std::string path(uint64_t segment) const { return folder + "/" + segment_name(segment); }
  void throw_if_failed() const;
};

// For what a failed call leaves behind: the first error is the one to tell.
template <class Fn>
void quietly(Fn fn) {
  try {
    fn();
  } catch (const IoError&) {
  }
}

}  // namespace hotrow
