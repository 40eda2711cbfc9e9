// A table's rows on SSD: an append-only log of fixed-size records in segment files.
//
// append() gives a record its place, for ever: segment number and number inside the segment. Records gather in a buffer
// and leave in large sequential direct writes, in the background; a record that is still in the buffer is read from
// there. Nothing is ever overwritten: a newer record gets a new place, and kill() marks the old one dead. One bit a
// record says what is alive; that is all a compaction needs, and a copy of the bits at a step boundary, together with
// the segments they speak of, *is* a snapshot: no order, no tombstones, every key exactly once.
//
// Segments are immutable once sealed. A folder that holds a snapshot has MANIFEST (its segments, how many records of
// each count, their live bits, a checksum) and the segment files; that is the form of a checkpoint's rows. publish()
// puts one there: sealed segments are hard-linked where the disk is the same and copied where not (or linked from
// `previous`, an older snapshot on that disk). So a segment's bytes live as long as any snapshot needs them, and
// removing an old snapshot is removing its folder. The log's own folder has no MANIFEST: what counts is known here.
//
// Blocks: docs/formats/segments.md. Each block has a checksum that also covers where it belongs; a block that does not
// fit is an error that names file and block, never a half-read row.
//
// Threads: append, kill, seal, begin_snapshot and compaction's writes belong to the table's writer (one at a time).
// read() may run from any thread beside them. A failed write loses nothing: the records stay in the buffer and
// readable, and the next call that needs the room tries again, throws when that fails too, and has then done nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/reader.h"

namespace hotrow {

// A file on disk is not what it must be. The message names the file (and block) and the cure.
class CorruptFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct RecordHead {
  int64_t key;
  uint32_t stamp;  // last step + 1
  uint16_t count;  // as in the header
  uint16_t flags;  // 0
};
static_assert(sizeof(RecordHead) == 16);

using Place = uint64_t;  // segment << kRecordBits | record, below 2^40
inline constexpr int kRecordBits = 20;
inline constexpr Place kNoPlace = ~Place{0};
inline constexpr Place kMostPlaces = Place{1} << 40;

struct LogOptions {
  std::string folder;
  std::string table;   // its name, for messages and the segments' headers
  uint32_t row_bytes;  // of the values behind a record's head
  uint64_t segment_bytes = uint64_t{64} << 20;
  size_t buffer_bytes = size_t{1} << 20;
  int depth = 128;        // reads in flight
  uint32_t row_type = 0;  // what the values are (rows/row_type.h); the log only keeps it
};

struct LogReport {
  uint64_t segments, records, live;      // records on disk and in the buffer; those alive
  uint64_t disk_bytes, live_bytes;       // of files; of live records
  uint64_t bytes_written, rows_written;  // since the log was opened, compaction included
  uint64_t bytes_read, blocks_read, rows_read;
  uint64_t compacted_bytes;
  size_t ram_bytes;  // buffers and bits: what counts against the dram budget
};

// Which records count, by segment: what a snapshot is made of.
struct LiveSet {
  struct Part {
    uint32_t records = 0;  // in the file; those behind them are not part of it
    uint64_t live = 0;
    std::vector<uint64_t> bits;  // one a record
  };
  std::map<uint64_t, Part> segments;
  void set(Place place);  // grows the part as needed
  uint64_t live() const;
};

class Log {
 public:
  // An empty log in a folder (made if it is missing). Segment files that are there already are removed: what counts is
  // brought back with adopt(). The caller holds the folder's lock.
  explicit Log(LogOptions options);
  ~Log();  // writes nothing
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  const LogOptions& options() const { return options_; }
  uint32_t record_bytes() const { return record_bytes_; }
  uint32_t block_bytes() const { return block_bytes_; }
  uint32_t records_per_block() const { return records_per_block_; }

  // --- writing -------------------------------------------------------------------------------------------------------
  // The new record is alive (unless told that it is only for a snapshot).
  Place append(const RecordHead& head, const void* values, bool alive = true);
  // As many of these records as there is room for, at least one; returns how many. Throws when it has appended none.
  // Requires: count > 0.
  size_t append(const RecordHead* heads, const void* const* values, size_t count, Place* places, bool alive = true);
  void kill(Place place);
  bool alive(Place place) const;
  // Writes what is buffered and ends the open segment; its data is on the disk afterwards.
  void seal();

  // --- reading -------------------------------------------------------------------------------------------------------
  // records[i * record_bytes()] gets the record at places[i]. Sorted, coalesced by block, deep in the queue. Throws
  // CorruptFile or IoError. Any thread.
  void read(const Place* places, size_t count, char* records) const;

  // --- snapshots -----------------------------------------------------------------------------------------------------
  // The live records at this moment. The caller adds (LiveSet::set) those it appends for the snapshot later. Until
  // end_snapshot no segment is removed.
  LiveSet begin_snapshot();
  void end_snapshot();
  // Makes `folder` (which must not exist) hold the snapshot: segments linked or copied, MANIFEST last, all synced.
  // Requires: seal() since the set's last record was appended. Returns the bytes that had to be copied.
  uint64_t publish(const LiveSet& set, const std::string& folder, const std::string& previous = "");
  // Brings a snapshot's segments into this empty log, linked where possible, else copied; all their records that count
  // are alive. Checks headers and sizes, not yet the data.
  void adopt(const std::string& folder);

  // --- compaction ----------------------------------------------------------------------------------------------------
  // The segment most worth rewriting (sealed, less than half alive, or small when there are many small ones), or -1.
  int64_t worst() const;
  // Places of the segment's live records, for the caller to read, append again (checking that they are still theirs)
  // and kill.
  std::vector<Place> live_places(uint64_t segment) const;
  // Removes sealed segments without a live record, unless a snapshot is being taken. Returns how many.
  int drop_dead();

  LogReport report() const;
  size_t trim();  // frees the memory of readers that nobody uses now; returns the bytes

 private:
  LogOptions options_;
  uint32_t record_bytes_ = 0, block_bytes_ = 0, records_per_block_ = 0;
  struct State;
  std::unique_ptr<State> state_;
};

// Reads a snapshot folder (a checkpoint's rows) record by record, for loading and for inspect.
class SnapshotReader {
 public:
  explicit SnapshotReader(const std::string& folder);  // throws CorruptFile, IoError
  ~SnapshotReader();

  const std::string& table() const;
  uint32_t row_bytes() const;
  uint32_t row_type() const;
  uint64_t rows() const;
  // The next live records, at most `most`, in the order of their places: heads, values [n, row_bytes], places. Returns
  // how many; 0 at the end. Every block is verified.
  size_t next(size_t most, std::vector<RecordHead>& heads, std::vector<char>& values, std::vector<Place>& places);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hotrow
