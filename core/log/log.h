// A table's rows on SSD: an append-only log of fixed-size records in segment files.
//
// append() returns the record's address (segment number, record number), which never changes. Records collect in a
// buffer and are written in the background in large sequential direct writes; until then they are read from the buffer.
// Nothing is overwritten: a new version of a row gets a new address, and mark_dead() clears the old record's live bit.
// One live bit per record is all that compaction needs. A copy of the live bits at a step boundary, with the segments
// they refer to, is a snapshot: no ordering, no tombstones, each key exactly once.
//
// A sealed segment is immutable. A snapshot folder has the segment files and a MANIFEST (segments, record counts, live
// bits, checksum); a checkpoint stores rows in this form. export_snapshot() hard-links sealed segments on the same disk
// and copies them to another disk (or links them from `previous`, an older snapshot on that disk). A segment's bytes
// live as long as any snapshot links them, so removing a snapshot is removing its folder. The log's own folder has no
// MANIFEST: its live bits are in memory.
//
// Format: docs/formats/segments.md. A block's checksum also covers its table, segment and position. A block that does
// not match is an error that names the file and the block; no row of it is returned.
//
// Threads: append, mark_dead, seal, begin_snapshot and compaction belong to the table's single writer. read() may run
// on any thread beside them. A failed write loses nothing: the records stay in the buffer and can be read. The next
// append that needs the space retries; if that fails too it throws and appends nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/reader.h"
#include "segment/record.h"

namespace hotrow {

struct LogOptions {
  std::string folder;
  std::string table;   // its name, for error texts and segment headers
  uint32_t row_bytes;  // of the values after a record's head
  uint64_t segment_bytes = uint64_t{64} << 20;
  size_t buffer_bytes = size_t{1} << 20;
  int depth = 128;        // reads in flight
  uint32_t row_type = 0;  // type of the values (rows/row_type.h); the log only stores it
};

struct LogReport {
  uint64_t segments, records, live;      // records on disk and in the buffer; live ones
  uint64_t disk_bytes, live_bytes;       // of files; of live records
  uint64_t bytes_written, rows_written;  // since the log was opened, compaction included
  uint64_t bytes_read, blocks_read, rows_read;
  uint64_t compacted_bytes;
  size_t ram_bytes;  // buffers and live bits: what is charged to the dram budget
};

// The live records by segment: what a snapshot consists of.
struct LiveSet {
  struct Part {
    uint32_t records = 0;  // in the file; later records are not part of the set
    uint64_t live = 0;
    std::vector<uint64_t> bits;  // one a record
  };
  std::map<uint64_t, Part> segments;
  void set(RecordAddress place);  // grows the part as needed
  uint64_t live() const;
};

class Log {
 public:
  // Opens an empty log in a folder (created if missing). Existing segment files are removed; import_snapshot() brings
  // the needed ones back. The caller holds the folder's lock.
  explicit Log(LogOptions options);
  ~Log();  // writes nothing
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  const LogOptions& options() const { return options_; }
  uint32_t record_bytes() const { return record_bytes_; }
  uint32_t block_bytes() const { return block_bytes_; }
  uint32_t records_per_block() const { return records_per_block_; }

  // --- writing ---
  // The new record is live, unless it is only for a snapshot.
  RecordAddress append(const RecordHead& head, const void* values, bool alive = true);
  // Appends as many of these records as fit, at least one; returns how many. Throws if it has appended none. Requires:
  // count > 0.
  size_t append(const RecordHead* heads, const void* const* values, size_t count, RecordAddress* places,
                bool alive = true);
  void mark_dead(RecordAddress place);
  bool alive(RecordAddress place) const;
  // Writes the buffer and closes the open segment; its data is durable afterwards.
  void seal();

  // --- reading ---
  // Reads the record at places[i] into records + i * record_bytes(). Sorts, merges reads of one block, and keeps many
  // reads in flight. Throws CorruptFile or IoError. Any thread.
  void read(const RecordAddress* places, size_t count, char* records) const;

  // --- snapshots ---
  // The live records now. The caller adds (LiveSet::set) records that it appends for the snapshot later. No segment is
  // removed until end_snapshot.
  LiveSet begin_snapshot();
  void end_snapshot();
  // Writes the snapshot to `folder` (which must not exist): segments linked or copied, MANIFEST last, all synced.
  // Requires: seal() since the set's last record was appended. Returns the bytes that had to be copied.
  uint64_t export_snapshot(const LiveSet& set, const std::string& folder, const std::string& previous = "");
  // Imports a snapshot's segments into this empty log, linked if possible, otherwise copied; the snapshot's records are
  // live. Checks headers and sizes, not the data.
  void import_snapshot(const std::string& folder);

  // --- compaction ---
  // The segment to compact next (sealed, less than half live, or small when there are many small ones), or -1.
  int64_t pick_for_compaction() const;
  // Addresses of the segment's live records. The caller reads them, appends them again if they are still current, and
  // marks the old ones dead.
  std::vector<RecordAddress> live_places(uint64_t segment) const;
  // Removes sealed segments without a live record, unless a snapshot is being taken. Returns how many.
  int remove_dead_segments();

  LogReport report() const;
  size_t trim();  // frees the memory of idle readers; returns the bytes

 private:
  LogOptions options_;
  uint32_t record_bytes_ = 0, block_bytes_ = 0, records_per_block_ = 0;
  struct State;
  std::unique_ptr<State> state_;
};

// Reads a snapshot folder (the rows of a checkpoint) record by record, for loading and inspecting.
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
  size_t next(size_t most, std::vector<RecordHead>& heads, std::vector<char>& values,
              std::vector<RecordAddress>& places);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hotrow
