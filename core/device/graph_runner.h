// Runs one batch on a GPU lane, from keys to logits, without Python. The host's part is two graph launches and reading
// the rows that HBM lacks, about 100 us; the interpreter would double that.
//
//   keys, dense → pinned → [graph 1: find and gather] → wait → read missing rows → pinned →
//   [graph 2: insert them, run the tower, copy logits back] → wait → logits
//
// All buffers belong to the lane (serve/execution/device_lane.py allocates them and captures the graphs over them). A
// runner has one batch in flight. Several runners of a lane share its stream, so a large batch is pipelined through
// them: enqueue_lookup() never blocks, fill_misses_and_enqueue_tower() blocks until the lookup is done, and
// copy_logits() blocks until the tower is done.
#pragma once

#include <memory>
#include <vector>

#include "device/miss_lists.h"
#include "device/reader_writer_gate.h"

namespace hotrow::device {

// The miss lists of one group of tables (pinned, written by graph 1) and the buffers that their rows go to (pinned,
// read by graph 2).
struct MissBuffers {
  std::vector<std::shared_ptr<Table>> tables;  // by feature
  MissLists lists;
  float* rows;
  int64_t* places;
  int64_t* keys;             // keys of the missing rows, contiguous
  int32_t* count;            // of missing rows, read by graph 2
  size_t width = 0;          // floats of an example in the matrix that the rows go to; 0: RunnerBuffers' width
  uint32_t* late = nullptr;  // null: RunnerBuffers' late. Others are zeroed by their owner
};

struct RunnerBuffers {
  size_t capacity, features, dense, width, tasks;  // examples; then per example: ids, dense features, floats, logits
  int64_t* keys;
  int32_t* examples;
  float* dense_in;
  const float* logits;
  uint32_t* late;
};

class GraphRunner {
 public:
  GraphRunner(std::shared_ptr<ReaderWriterGate> gate, int lane, Handle stream, Handle find, Handle tower,
              const RunnerBuffers& buffers, std::vector<MissBuffers> missing);

  // Requires: count <= capacity; keys[f] has one id of each example for feature f.
  void enqueue_lookup(const std::vector<const int64_t*>& keys, size_t count, const float* dense);
  // Returns how many ids were missing.
  size_t fill_misses_and_enqueue_tower(ColdReadPolicy policy);
  void copy_logits(float* out);

 private:
  std::shared_ptr<ReaderWriterGate> gate_;
  const int lane_;
  const Handle stream_;
  Handle context_ = nullptr;
  RunnerBuffers buffers_;
  std::vector<MissBuffers> misses_;
  Graph find_, tower_;
  Event found_, done_;
  size_t count_ = 0;
};

}  // namespace hotrow::device
