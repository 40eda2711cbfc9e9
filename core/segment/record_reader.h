// Reads many records from many addresses and keeps the disk's queue full.
//
// Requests are sorted by address, so records of one block are adjacent, and adjacent blocks merge into one read of up
// to 128 KiB. The reads go through a few buffers, each with its own io Reader. While one buffer's blocks are verified
// and their records copied out, the reads of the others are in flight; an emptied buffer is refilled at once. Memory is
// bounded, however many records are requested.
//
// Every block's checksum is verified (segment.h) before a record of it is copied.
//
// Threads: a RecordReader belongs to one thread at a time. A RecordReaderPool may be used from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "io/aligned_memory.h"
#include "io/reader.h"
#include "segment/segment.h"

namespace hotrow {

// A request, sortable: the record address and the index of its result.
using RecordRequest = uint64_t;
inline constexpr int kRequestIndexBits = 20;
inline constexpr size_t kMaxRequests = size_t{1} << kRequestIndexBits;  // in one call
inline RecordRequest make_request(RecordAddress place, size_t index) { return place << kRequestIndexBits | index; }
inline RecordAddress request_address(RecordRequest wanted) { return wanted >> kRequestIndexBits; }
inline size_t request_index(RecordRequest wanted) { return wanted & (kMaxRequests - 1); }
inline uint32_t record_of(RecordAddress place) { return static_cast<uint32_t>(place & (kMostRecords - 1)); }

// Requests [begin, end) are for this segment's file.
struct SegmentRequests {
  std::shared_ptr<const File> file;
  uint64_t seed;
  size_t begin, end;
};

class RecordReader {
 public:
  RecordReader(const Geometry& geometry, int depth) : geometry_(geometry), depth_(depth) {}

  // Copies each requested record to records + index * record_bytes. Requires: requests are sorted, segments in the same
  // order. Returns how many blocks it read. Throws CorruptFile and IoError.
  uint64_t read(const std::vector<RecordRequest>& wanted, const std::vector<SegmentRequests>& runs, char* records);

  std::vector<RecordRequest> wanted;               // memory for the caller's requests, reused
  size_t ram_bytes() const { return ram_bytes_; }  // after the last read; any thread
  void trim();                                     // frees its memory; the next read allocates it again

 private:
  struct Piece {  // one block of a read, and the requests for it
    const SegmentRequests* run;
    uint32_t block;
    const char* bytes;
    size_t begin, end;
  };
  struct ReadBuffer {
    std::unique_ptr<Reader> reader;
    Aligned memory;
    std::vector<ReadRequest> requests;
    std::vector<Piece> pieces;
  };
  struct Cursor {
    size_t run = 0, at = 0;
  };

  size_t buffer_bytes() const;
  ReadBuffer& buffer(size_t number);
  void start(ReadBuffer& buffer, const std::vector<RecordRequest>& wanted, const std::vector<SegmentRequests>& runs,
             Cursor& cursor);
  void finish(ReadBuffer& buffer, const std::vector<RecordRequest>& wanted, char* records);

  Geometry geometry_;
  int depth_;
  std::vector<ReadBuffer> buffers_;
  std::atomic<size_t> ram_bytes_{0};
};

// A pool of at most a few readers. A caller blocks until one is free, which costs nothing when the disk is busy.
class RecordReaderPool {
 public:
  RecordReaderPool(const Geometry& geometry, int depth) : geometry_(geometry), depth_(depth) {}

  // One pool for all logs with the same record size: tables of one collection share its memory.
  static std::shared_ptr<RecordReaderPool> shared(const Geometry& geometry, int depth);

  struct ReturnToPool {
    RecordReaderPool* from;
    void operator()(RecordReader* reader) const { from->give_back(reader); }
  };
  using Lease = std::unique_ptr<RecordReader, ReturnToPool>;
  Lease acquire();
  size_t ram_bytes() const;
  size_t trim();  // frees the memory of idle readers; returns the bytes

 private:
  void give_back(RecordReader* reader);

  Geometry geometry_;
  int depth_;
  mutable std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<std::unique_ptr<RecordReader>> all_;
  std::vector<RecordReader*> idle_;
};

}  // namespace hotrow
