// Moves rows of several tables between DRAM and one GPU. Each direction is one call per batch, without Python's
// interpreter lock, because three trainer threads move rows at the same time and would contend for it.
//
//   upload       Some rows are read by the GPU directly from DRAM (zero-copy, stream `up`): pool threads find the slots
//                of one part while a captured launch reads the part before it.
//                The other rows are gathered into pinned memory and copied (stream `copies`).
//                Both run in one call of the thread pool. The thread that finishes a part launches or copies it.
//   write-back   Rows are copied into pinned memory chunk by chunk (stream `down`). Each chunk is stored into its DRAM
//                slots when its copy has arrived.
//
// Why uploads use both: zero-copy reads reach 29 million rows/s at any row width and page size, because each row costs
// one IOMMU miss on the host. CPU cores gather 50 GB/s, and copies run at the link's 55 GB/s. Each has its own limit,
// so using both is faster than either. They need separate streams: on one stream, copies would wait for zero-copy
// reads.
//
// Launches are CUDA graphs, captured once. Before each launch the host writes the arguments into a struct in pinned
// memory, which the graph's kernels read (kernels/rows/transfer.py).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "device/cuda_driver.h"
#include "device/row_staging.h"

namespace hotrow::device {

// The arguments of a zero-copy launch.
struct ZeroCopyArgs {
  int64_t slots, tables;  // device addresses: target slots, and the table of each row
  int64_t hosts, count;   // DRAM address of the rows' slots in DRAM, and the number of rows
};

// The arguments of the launch that ends an upload: it stores slots, steps and counts, and scatters staged rows.
struct ScatterArgs {
  int64_t slots;            // device address of the target slots
  int64_t places;           // pinned address of DRAM slots, steps and counts, contiguous
  int64_t count;            // rows
  int64_t zero_copy_count;  // of them read in place
  int64_t device_staging;   // device address of the others
};

struct Upload {
  std::vector<TableRange> parts;
  size_t count;
  const int64_t* keys;                  // null: the slots are known
  uint32_t *slots, *steps, *counts;     // slots in DRAM; arrays are pinned
  size_t zero_copy_count;               // rows before it are read in place; the others are staged
  int64_t device_slots, device_tables;  // device arrays: target slot and table of each row
  float* staged;                        // pinned memory for the staged rows, contiguous
  DeviceAddress device_staging;         // their copy on the device
  bool stop_at_first_miss;              // stop when a row is missing
  bool scatter;                         // scatter the rows at the end; otherwise the caller does
};

// A write-back in flight. The buffers passed to begin_write_back and store_rows must stay valid until store_rows
// returns. The destructor of a WriteBack that was never stored waits for its copies, because they still write to pinned
// memory.
class WriteBack {
 public:
  WriteBack(Handle context, const float* staged, size_t width) : context_(context), staged_(staged), width_(width) {}
  ~WriteBack();
  WriteBack(const WriteBack&) = delete;
  WriteBack& operator=(const WriteBack&) = delete;

  // Waits for each chunk and stores it. Arguments are those of write_back_rows.
  void store_rows(const std::vector<TableRange>& parts, const uint32_t* slots, const uint32_t* steps,
                  const uint32_t* counts, uint32_t last_clean_step);

 private:
  friend class RowTransfer;
  struct Chunk {
    size_t begin, end;
    std::unique_ptr<Event> arrived;
  };
  Handle context_;
  const float* staged_;
  size_t width_;
  std::vector<Chunk> chunks_;
};

// At most one upload at a time. Any number of write-backs may run beside it.
class RowTransfer {
 public:
  // `zero_copy_launches` and `scatter_launches` are captured graphs with their arguments; one zero-copy launch reads up
  // to `capacity` rows. `width` is in floats.
  RowTransfer(Handle up, Handle copies, Handle down, size_t width, size_t capacity, size_t chunk_rows,
              const std::vector<std::pair<Handle, ZeroCopyArgs*>>& zero_copy_launches,
              const std::vector<std::pair<Handle, ScatterArgs*>>& scatter_launches);

  // Returns how many rows are missing. Stream `up` continues when all rows are on the device. `parts` is the number of
  // parts that the zero-copy rows are split into.
  size_t upload(const Upload& upload, size_t parts);
  // After the work enqueued on `stream`, starts copying `rows` rows at `device_rows` to pinned memory.
  std::unique_ptr<WriteBack> begin_write_back(Handle stream, DeviceAddress device_rows, size_t rows, float* staged);

 private:
  // A captured launch with its arguments in pinned memory. The arguments may change when event `read` is complete.
  template <class Cell>
  struct Launch {
    Graph graph;
    Cell* cell;
    Event read;
    Launch(Handle captured, Cell* cell) : graph(captured), cell(cell) {}
    void run(Handle stream, const Cell& args) {
      *cell = args;
      graph.launch(stream);
      read.record(stream);
    }
  };

  void launch_zero_copy(const Upload& upload, size_t begin, size_t end, Launch<ZeroCopyArgs>& launch);
  void enqueue_copy(const Upload& upload, size_t begin, size_t end);

  const Handle up_, copies_, down_;
  Handle context_ = nullptr;
  const size_t width_, capacity_, chunk_rows_;
  std::deque<Launch<ZeroCopyArgs>> zero_copy_;
  std::deque<Launch<ScatterArgs>> scatter_;
  size_t next_ = 0, next_scatter_ = 0;  // the next launch to use
  Event copied_;
};

}  // namespace hotrow::device
