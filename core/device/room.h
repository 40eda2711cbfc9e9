// A batch on a lane of a GPU, from keys to logits, in one call and without Python: what a batch needs of the host is
// two launches and the rows that HBM lacks, some 100 us, and Python around it would take as long again.
//
//   keys, dense → pinned → [graph: find and gather] → wait → rows that are missing → pinned → [graph: put them, tower,
//   logits down] → wait → logits
//
// Everything lies in the lane's own buffers (serve/device_lane.py has them, and captured the graphs over them). A room
// has one batch at a time; rooms of a lane share its stream. `ask` does not wait, `answer` waits for what `ask` asked,
// `logits` for the tower: a large batch goes through several rooms in turn.
#pragma once

#include <memory>
#include <vector>

#include "device/gate.h"
#include "rows/device_rows.h"

namespace hotrow::device {

// What a lookup did not find of one group of tables (pinned, written by the device), and where their rows go (pinned).
struct Missing {
  std::vector<std::shared_ptr<Table>> tables;  // of each feature
  MissingLists lists;
  float* rows;
  int64_t* places;
  int64_t* keys;   // theirs, one behind another
  int32_t* count;  // of them, for the device
};

struct RoomBuffers {
  size_t room, features, dense, width, tasks;  // examples; ids, dense features, floats and logits of each
  int64_t* keys;
  int32_t* examples;
  float* dense_in;
  const float* logits;
  uint32_t* late;
};

class Room {
 public:
  Room(std::shared_ptr<Gate> gate, int lane, Handle stream, Handle find, Handle tower, const RoomBuffers& buffers,
       std::vector<Missing> missing);

  // Requires: at most `room` examples; `keys[f]` has one id of each for feature f.
  void ask(const std::vector<const int64_t*>& keys, size_t count, const float* dense);
  // Returns how many ids were missing.
  size_t answer(Cold policy);
  void logits(float* out);

 private:
  std::shared_ptr<Gate> gate_;
  const int lane_;
  const Handle stream_;
  Handle context_ = nullptr;
  RoomBuffers buffers_;
  std::vector<Missing> missing_;
  Graph find_, tower_;
  Event found_, done_;
  size_t count_ = 0;
};

}  // namespace hotrow::device
