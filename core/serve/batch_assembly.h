// Assembles the frames of several requests into the columns of one batch, in one call; and splits a batch's logits into
// the answers of its requests.
//
// A slice is a range of rows of one request (a request larger than a batch becomes several slices). For each feature
// the batch has values, offsets (none if every row has one id) and weights (none if no slice has any; 1 for a slice
// without). Shared features are expanded: each row of the slice gets a copy of the ids. Slices and their rows keep
// their order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "serve/frame.h"

namespace hotrow::serve {

struct RequestSlice {
  const uint8_t* data;
  size_t size;
  uint32_t first;  // row
  uint32_t rows;
};

// What every frame of a batch must match.
struct BatchLayout {
  uint32_t features;
  uint32_t dense;
  uint32_t fingerprint;
  uint64_t most_ids;  // more ids than this are an error
};

struct Column {
  uint64_t begin = 0, end = 0;  // in values, and in weights
  bool jagged = false;
  bool weighted = false;
  uint64_t offsets = 0;  // where its rows + 1 offsets begin, if jagged
};

struct AssembledBatch {
  uint64_t rows = 0;
  std::vector<Column> columns;
  std::unique_ptr<int64_t[]> values;   // columns one after the other
  std::unique_ptr<int64_t[]> offsets;  // of the jagged columns
  std::unique_ptr<float[]> weights;    // as long as values, if any column has weights
  std::unique_ptr<float[]> dense;      // [rows, layout.dense]
  uint64_t ids = 0, offset_count = 0;
  bool weighted = false;
};

// Checks all bytes of the slices. Throws FrameError.
AssembledBatch assemble(std::span<const RequestSlice> pieces, const BatchLayout& layout);

struct AnswerPart {
  uint64_t id;
  uint64_t first;  // row in the logits
  uint32_t rows;
  uint32_t late;
};

struct AnswerCommon {
  uint32_t version;
  uint64_t publication;
  uint64_t highest;
  int64_t watermark;
  bool compiled;
  uint32_t tasks;  // 0: logits are [rows]
};

// The bytes that write_answers() writes.
uint64_t answers_size(std::span<const AnswerPart> parts, const AnswerCommon& common);
// The answers' frames one after the other. Throws FrameError if a part's rows are not in the logits.
void write_answers(std::span<const AnswerPart> parts, const AnswerCommon& common, const float* logits,
                   uint64_t logit_rows, uint8_t* out);

}  // namespace hotrow::serve
