// The state of a Log: its segments with their live bits, the open segment, and the pool of readers.
//
// The mutex guards the segments and the writer's buffers. It is held briefly and never during file access. Only the
// table's single writer changes state, so the writer may read without the mutex. Readers take the mutex and copy what
// they need: a file handle, or a record from the buffer. A file stays open while a reader uses it, even if its segment
// was removed.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "log/log.h"
#include "segment/record_reader.h"
#include "segment/segment.h"
#include "segment/segment_writer.h"

namespace hotrow {

// A failed sync: the system may have discarded the data and will not report it again. The log takes no more snapshots;
// its records can still be read.
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

  std::shared_ptr<RecordReaderPool> readers;  // of all logs with such records
  std::atomic<uint64_t> bytes_written{0}, rows_written{0}, bytes_read{0}, blocks_read{0}, rows_read{0},
      compacted_bytes{0};

  // Throws std::out_of_range. Requires: the mutex.
  LogSegment& segment(uint64_t number);
  void begin_segment();
  std::string path(uint64_t segment) const { return folder + "/" + segment_name(segment); }
  void throw_if_failed() const;
};

// For cleaning up after a failed call: the first error is the one to report.
template <class Fn>
void ignore_io_error(Fn fn) {
  try {
    fn();
  } catch (const IoError&) {
  }
}

}  // namespace hotrow
