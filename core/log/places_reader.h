// Many records from many places, with the disk's queue kept full.
//
// The wanted records come sorted by place, so those of one block are neighbours and neighbouring blocks join into one
// read of up to 128 KiB. A few lanes take turns: each has its own Reader and memory, takes as many reads as it holds,
// and is checked and copied out while the other lanes' reads are on their way. A lane is refilled as soon as it is
// empty, so there is no moment when everything waits for everything, and the memory is bounded whatever is asked for.
//
// Every block that is read is checked (segment.h) before a record of it is copied.
//
// Threads: a PlacesReader belongs to one thread at a time; a pool of them (PlacesReaders) may be asked from any.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "log/aligned.h"
#include "log/segment.h"

namespace hotrow {

// A wanted record, to be sorted: its place and which of the results it is.
using Wanted = uint64_t;
inline constexpr int kWantedBits = 20;
inline constexpr size_t kMostWanted = size_t{1} << kWantedBits;  // in one call
inline Wanted make_wanted(Place place, size_t index) { return place << kWantedBits | index; }
inline Place wanted_place(Wanted wanted) { return wanted >> kWantedBits; }
inline size_t wanted_index(Wanted wanted) { return wanted & (kMostWanted - 1); }
inline uint32_t record_of(Place place) { return static_cast<uint32_t>(place & (kMostRecords - 1)); }

// Wanted records [begin, end) are in this segment's file.
struct WantedRun {
  std::shared_ptr<const File> file;
  uint64_t seed;
  size_t begin, end;
};

class PlacesReader {
 public:
  PlacesReader(const Geometry& geometry, int depth) : geometry_(geometry), depth_(depth) {}

  // records[index * record_bytes] gets each wanted record. Requires: sorted; runs in the same order. Returns how many
  // blocks it read. Throws CorruptFile and IoError.
  uint64_t read(const std::vector<Wanted>& wanted, const std::vector<WantedRun>& runs, char* records);

  std::vector<Wanted> wanted;                      // for the caller, to be used again
  size_t ram_bytes() const { return ram_bytes_; }  // after the last read; any thread
  void trim();                                     // gives its memory back; the next read takes it again

 private:
  struct Piece {  // of a request: one block and what is wanted of it
    const WantedRun* run;
    uint32_t block;
    const char* bytes;
    size_t begin, end;
  };
  struct Lane {
    std::unique_ptr<Reader> reader;
    Aligned memory;
    std::vector<ReadRequest> requests;
    std::vector<Piece> pieces;
  };
  struct Cursor {
    size_t run = 0, at = 0;
  };

  size_t lane_bytes() const;
  Lane& lane(size_t number);
  void start(Lane& lane, const std::vector<Wanted>& wanted, const std::vector<WantedRun>& runs, Cursor& cursor);
  void finish(Lane& lane, const std::vector<Wanted>& wanted, char* records);

  Geometry geometry_;
  int depth_;
  std::vector<Lane> lanes_;
  std::atomic<size_t> ram_bytes_{0};
};

// Lends readers. There are never more than a few: a further caller waits, which costs nothing when the disk is busy.
class PlacesReaders {
 public:
  PlacesReaders(const Geometry& geometry, int depth) : geometry_(geometry), depth_(depth) {}

  // One pool for all logs with the same records: tables of one collection read in turns, and share the memory.
  static std::shared_ptr<PlacesReaders> shared(const Geometry& geometry, int depth);

  struct GiveBack {
    PlacesReaders* from;
    void operator()(PlacesReader* reader) const { from->give_back(reader); }
  };
  using Lent = std::unique_ptr<PlacesReader, GiveBack>;
  Lent lend();
  size_t ram_bytes() const;
  size_t trim();  // frees what readers hold that nobody uses now; returns the bytes

 private:
  void give_back(PlacesReader* reader);

  Geometry geometry_;
  int depth_;
  mutable std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<std::unique_ptr<PlacesReader>> all_;
  std::vector<PlacesReader*> idle_;
};

}  // namespace hotrow
