// Rows of several tables between DRAM and a GPU: what the host does for a batch's rows is one call each way, without
// Python, because three threads of a trainer do it at once and would spend their time on its lock.
//
//   up     find a part's rows in DRAM ─→ a launch reads them in place       (stream `up`)
//          ... the next part, while that one is read ...
//          find and gather a piece into pinned memory ─→ a copy             (stream `copies`)
//          all in one run of the pool: who finishes a part or a piece launches or copies it
//   down   copies into pinned memory, piece by piece (stream `down`), each put into DRAM when it is there
//
// In place: 29 million rows a second, whatever their width and pages, because each is a miss of the host's IOMMU; the
// cores gather 50 GB/s and copies go at the wire's 55. Each way alone is bound by its own limit, so rows take both, and
// the two must be on streams of their own: on one, copies would wait for what is read in place.
//
// Launches are captured graphs over cells in pinned memory, which say what to read (kernels/move.py).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "device/driver.h"
#include "rows/device_rows.h"

namespace hotrow::device {

// What a launch reads: device addresses of slots and tables, the address of the rows' slots in DRAM, and how many.
struct PullCell {
  int64_t slots, tables, hosts, count;
};

// What ends it: the address of the rows' slots on the device, of slots, steps and counts in DRAM, one behind another
// (pinned), how many, how many of them were read in place, and where the others are.
struct LandCell {
  int64_t slots, places, count, first, incoming;
};

struct Rising {
  std::vector<TablePart> parts;
  size_t count;
  const int64_t* keys;                  // null: slots are known
  uint32_t *slots, *steps, *counts;     // in DRAM, pinned
  size_t first;                         // rows before it are read in place
  int64_t device_slots, device_tables;  // where those go
  float* staged;                        // pinned, for the others, row behind row
  DeviceAddress incoming;               // and on the device
  bool all;                             // stop as soon as a row is not there
  bool land;                            // and when they have come, finish it; else the caller does
};

// Rows on their way down. Everything it was given stays until `put` has returned, or until it is gone: one that nobody
// puts away waits for its copies, which still write.
class Leaving {
 public:
  Leaving(Handle context, const float* staged, size_t width) : context_(context), staged_(staged), width_(width) {}
  ~Leaving();
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

  // Waits for each piece. Steps and slots are as for lower_rows.
  void put(const std::vector<TablePart>& parts, const uint32_t* slots, const uint32_t* steps, const uint32_t* counts,
           uint32_t clean);

 private:
  friend class Way;
  struct Piece {
    size_t begin, end;
    std::unique_ptr<Event> arrived;
  };
  Handle context_;
  const float* staged_;
  size_t width_;
  std::vector<Piece> pieces_;
};

// One call of `raise` at a time, beside any number of `lower`.
class Way {
 public:
  // `pulls` are captured graphs, each with its cell; one reads up to `room` rows. `width` is in floats.
  Way(Handle up, Handle copies, Handle down, size_t width, size_t room, size_t piece,
      const std::vector<std::pair<Handle, PullCell*>>& pulls, const std::vector<std::pair<Handle, LandCell*>>& lands);

  // Returns how many rows are not there. `up` goes on when all that were asked for have come to the device.
  size_t raise(const Rising& rising, size_t parts);
  // After what was asked of `stream`, so many rows at `leaving` start into pinned memory.
  std::unique_ptr<Leaving> lower(Handle stream, DeviceAddress leaving, size_t rows, float* staged);

 private:
  // A captured launch with its cell. What the cell said has been read when `read` is past.
  template <class Cell>
  struct Launch {
    Graph graph;
    Cell* cell;
    Event read;
    Launch(Handle captured, Cell* cell) : graph(captured), cell(cell) {}
    void run(Handle stream, const Cell& says) {
      *cell = says;
      graph.launch(stream);
      read.record(stream);
    }
  };

  void pull(const Rising& rising, size_t begin, size_t end, Launch<PullCell>& pull);
  void copy(const Rising& rising, size_t begin, size_t end);

  const Handle up_, copies_, down_;
  Handle context_ = nullptr;
  const size_t width_, room_, piece_;
  std::deque<Launch<PullCell>> pulls_;
  std::deque<Launch<LandCell>> lands_;
  size_t next_ = 0, next_land_ = 0;  // of them
  Event copied_;
};

}  // namespace hotrow::device
