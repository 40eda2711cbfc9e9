// Frames: requests and answers as flat little-endian bytes between a front end and an engine (docs/formats/frames.md).
//
// Every frame begins with a FrameHead and is a multiple of 8 bytes long. A request's body is
//
//   packed:      int64 keys, [rows, features] or (kColumns) [features, rows]: one id per row in every feature
//   otherwise:   a FeatureHead for each feature; then for each its int64 values, its int64 offsets [rows + 1] if
//                jagged, and its float weights (to the next 8 bytes) if it has any
//   then:        float dense [rows, dense], or [1, dense] with kDenseShared, to the next 8 bytes
//
// Frames are untrusted input: RequestView::parse checks every length and offset against the frame's size, so a
// malformed frame is an error and never an out-of-bounds read.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hotrow::serve {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

enum class FrameKind : uint16_t { kRequest = 1, kAnswer = 2, kRefusal = 3, kCommand = 4, kReply = 5 };
enum class IdsKind : uint8_t { kOnePerRow = 0, kJagged = 1, kShared = 2 };
inline constexpr uint8_t kPacked = 1, kColumns = 2, kDenseShared = 4;  // a request's flags
inline constexpr uint8_t kCompiled = 1;                                // an answer's

struct FrameHead {
  uint32_t length;  // of the whole frame
  uint16_t kind;
  uint8_t policy;  // requests: 0 the model's, else 1 + the policy
  uint8_t flags;
  uint64_t id;  // the sender's; an answer has its request's
};
static_assert(sizeof(FrameHead) == 16);

struct RequestHead {
  FrameHead frame;
  uint32_t model;  // the engine's number for a model, or for one version of it
  uint32_t fingerprint;
  uint32_t rows;
  uint32_t features;
  int64_t deadline_left;  // microseconds; negative: the engine's default
  uint32_t dense;         // columns
  uint32_t reserved;
};
static_assert(sizeof(RequestHead) == 48);

struct FeatureHead {
  uint32_t count;
  uint8_t kind;
  uint8_t weighted;
  uint16_t reserved;
};
static_assert(sizeof(FeatureHead) == 8);

struct AnswerHead {
  FrameHead frame;
  uint32_t version;      // the engine's number for the version that answered
  uint32_t late;         // ids answered by policy
  uint64_t publication;  // the oldest publication that a part of the answer was read from
  uint64_t highest;      // the newest; equal to it unless a remote store or several batches answered
  int64_t watermark;     // event time of `publication`, milliseconds; INT64_MIN: not known
  uint32_t rows;
  uint32_t tasks;  // 0: logits are [rows]
};
static_assert(sizeof(AnswerHead) == 56);

// A malformed frame, or one that does not match the model.
struct FrameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct FeatureView {
  const uint8_t* values;
  const uint8_t* offsets;  // null unless jagged
  const uint8_t* weights;  // null without
  uint32_t count;
  IdsKind kind;
};

// A request frame with all lengths checked. The bytes need not be aligned.
struct RequestView {
  RequestHead head;
  const uint8_t* packed = nullptr;    // the matrix, if it is one
  std::vector<FeatureView> features;  // otherwise
  const uint8_t* dense = nullptr;
  uint64_t joined_ids = 0;  // number of ids after shared features are expanded

  bool is_packed() const { return head.frame.flags & kPacked; }
  // Accepts any bytes. Throws FrameError.
  void parse(const uint8_t* data, size_t size);
};

FrameHead read_head(const uint8_t* data);
int64_t read_int64(const uint8_t* data);

}  // namespace hotrow::serve
