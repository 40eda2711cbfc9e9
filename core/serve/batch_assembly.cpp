#include "serve/batch_assembly.h"

#include <algorithm>
#include <cstring>

namespace hotrow::serve {
namespace {

void check(const RequestView& view, const RequestSlice& piece, const BatchLayout& layout) {
  const RequestHead& head = view.head;
  if (head.fingerprint != layout.fingerprint) throw FrameError("frame was made for another signature");
  if (head.features != layout.features)
    throw FrameError("frame has " + std::to_string(head.features) + " features, the model " +
                     std::to_string(layout.features));
  if (head.dense != layout.dense)
    throw FrameError("frame has " + std::to_string(head.dense) + " dense columns, the model " +
                     std::to_string(layout.dense));
  if (piece.rows == 0 || piece.first > head.rows || piece.rows > head.rows - piece.first)
    throw FrameError("a slice's rows are outside of its request");
}

struct Source {
  RequestView view;
  uint32_t first, rows;

  // A feature's number of ids in this slice, and whether each row has exactly one.
  uint64_t ids(uint32_t feature) const {
    if (view.is_packed()) return rows;
    const FeatureView& ids = view.features[feature];
    if (ids.kind == IdsKind::kOnePerRow) return rows;
    if (ids.kind == IdsKind::kShared) return uint64_t{ids.count} * rows;
    return read_int64(ids.offsets + 8 * uint64_t{first + rows}) - read_int64(ids.offsets + 8 * uint64_t{first});
  }
  bool one_per_row(uint32_t feature) const {
    if (view.is_packed()) return true;
    const FeatureView& ids = view.features[feature];
    if (ids.kind == IdsKind::kOnePerRow) return true;
    if (ids.kind == IdsKind::kShared) return ids.count == 1;
    for (uint32_t row = first; row < first + rows; ++row)
      if (read_int64(ids.offsets + 8 * uint64_t{row + 1}) - read_int64(ids.offsets + 8 * uint64_t{row}) != 1)
        return false;
    return true;
  }
  bool weighted(uint32_t feature) const { return !view.is_packed() && view.features[feature].weights; }
};

void put_values(const Source& source, uint32_t feature, int64_t* out) {
  if (source.view.is_packed()) {
    const uint64_t features = source.view.head.features, rows = source.view.head.rows;
    if (source.view.head.frame.flags & kColumns) {
      std::memcpy(out, source.view.packed + 8 * (feature * rows + source.first), 8 * uint64_t{source.rows});
    } else {
      const uint8_t* at = source.view.packed + 8 * (source.first * features + feature);
      for (uint32_t row = 0; row < source.rows; ++row, at += 8 * features) std::memcpy(out + row, at, 8);
    }
    return;
  }
  const FeatureView& ids = source.view.features[feature];
  if (ids.kind == IdsKind::kShared) {
    if (ids.count == 1) {
      std::fill_n(out, source.rows, read_int64(ids.values));
    } else {
      for (uint32_t row = 0; row < source.rows; ++row)
        std::memcpy(out + uint64_t{row} * ids.count, ids.values, 8 * uint64_t{ids.count});
    }
    return;
  }
  const uint64_t skip = ids.kind == IdsKind::kOnePerRow
                            ? source.first
                            : static_cast<uint64_t>(read_int64(ids.offsets + 8 * uint64_t{source.first}));
  std::memcpy(out, ids.values + 8 * skip, 8 * source.ids(feature));
}

void put_weights(const Source& source, uint32_t feature, float* out) {
  const uint64_t count = source.ids(feature);
  if (!source.weighted(feature)) {
    std::fill_n(out, count, 1.0f);
    return;
  }
  const FeatureView& ids = source.view.features[feature];
  if (ids.kind == IdsKind::kShared) {
    for (uint32_t row = 0; row < source.rows; ++row)
      std::memcpy(out + uint64_t{row} * ids.count, ids.weights, 4 * uint64_t{ids.count});
    return;
  }
  const uint64_t skip = ids.kind == IdsKind::kOnePerRow
                            ? source.first
                            : static_cast<uint64_t>(read_int64(ids.offsets + 8 * uint64_t{source.first}));
  std::memcpy(out, ids.weights + 4 * skip, 4 * count);
}

// The slice's offsets without the first one; its ids begin at `at`.
void put_offsets(const Source& source, uint32_t feature, int64_t at, int64_t* out) {
  const bool jagged = !source.view.is_packed() && source.view.features[feature].kind == IdsKind::kJagged;
  if (jagged) {
    const uint8_t* offsets = source.view.features[feature].offsets + 8 * uint64_t{source.first};
    const int64_t shift = at - read_int64(offsets);
    for (uint32_t row = 0; row < source.rows; ++row) out[row] = read_int64(offsets + 8 * uint64_t{row + 1}) + shift;
    return;
  }
  const int64_t step = static_cast<int64_t>(source.ids(feature) / source.rows);
  for (uint32_t row = 0; row < source.rows; ++row) out[row] = at + step * (int64_t{row} + 1);
}

void put_dense(const Source& source, uint32_t columns, float* out) {
  const size_t bytes = 4 * size_t{columns};
  if (source.view.head.frame.flags & kDenseShared) {
    for (uint32_t row = 0; row < source.rows; ++row)
      std::memcpy(out + uint64_t{row} * columns, source.view.dense, bytes);
  } else {
    std::memcpy(out, source.view.dense + bytes * source.first, bytes * source.rows);
  }
}

// Computes all sizes before memory is allocated.
void measure(const std::vector<Source>& sources, const BatchLayout& layout, AssembledBatch& joined) {
  for (uint32_t feature = 0; feature < layout.features; ++feature) {
    Column column;
    column.begin = joined.ids;
    for (const Source& source : sources) {
      joined.ids += source.ids(feature);
      column.jagged = column.jagged || !source.one_per_row(feature);
      column.weighted = column.weighted || source.weighted(feature);
      if (joined.ids > layout.most_ids)
        throw FrameError("the joined batch has more than " + std::to_string(layout.most_ids) + " ids");
    }
    column.end = joined.ids;
    if (column.jagged) {
      column.offsets = joined.offset_count;
      joined.offset_count += joined.rows + 1;
    }
    joined.weighted = joined.weighted || column.weighted;
    joined.columns.push_back(column);
  }
}

}  // namespace

AssembledBatch assemble(std::span<const RequestSlice> pieces, const BatchLayout& layout) {
  std::vector<Source> sources(pieces.size());
  AssembledBatch joined;
  for (size_t i = 0; i < pieces.size(); ++i) {
    sources[i].view.parse(pieces[i].data, pieces[i].size);
    check(sources[i].view, pieces[i], layout);
    sources[i].first = pieces[i].first;
    sources[i].rows = pieces[i].rows;
    joined.rows += pieces[i].rows;
  }
  if (joined.rows > layout.most_ids)
    throw FrameError("the joined batch has more rows than the limit of " + std::to_string(layout.most_ids) + " ids");
  measure(sources, layout, joined);
  joined.values.reset(new int64_t[joined.ids]);
  joined.offsets.reset(new int64_t[joined.offset_count]);
  if (joined.weighted) joined.weights.reset(new float[joined.ids]);
  joined.dense.reset(new float[joined.rows * layout.dense]);
  for (uint32_t feature = 0; feature < layout.features; ++feature) {
    const Column& column = joined.columns[feature];
    uint64_t at = column.begin, row = 0;
    int64_t* offsets = joined.offsets.get() + column.offsets;
    if (column.jagged) *offsets = 0;
    for (const Source& source : sources) {
      put_values(source, feature, joined.values.get() + at);
      if (column.weighted) put_weights(source, feature, joined.weights.get() + at);
      if (column.jagged) put_offsets(source, feature, static_cast<int64_t>(at - column.begin), offsets + 1 + row);
      at += source.ids(feature);
      row += source.rows;
    }
  }
  uint64_t row = 0;
  for (const Source& source : sources) {
    if (layout.dense) put_dense(source, layout.dense, joined.dense.get() + row * layout.dense);
    row += source.rows;
  }
  return joined;
}

namespace {
uint64_t floats_of(const AnswerPart& part, const AnswerCommon& common) {
  return uint64_t{part.rows} * std::max<uint32_t>(1, common.tasks);
}
uint64_t answer_bytes(const AnswerPart& part, const AnswerCommon& common) {
  return sizeof(AnswerHead) + ((4 * floats_of(part, common) + 7) & ~uint64_t{7});
}
}  // namespace

uint64_t answers_size(std::span<const AnswerPart> parts, const AnswerCommon& common) {
  uint64_t bytes = 0;
  for (const AnswerPart& part : parts) bytes += answer_bytes(part, common);
  return bytes;
}

void write_answers(std::span<const AnswerPart> parts, const AnswerCommon& common, const float* logits,
                   uint64_t logit_rows, uint8_t* out) {
  for (const AnswerPart& part : parts) {
    if (part.first > logit_rows || part.rows > logit_rows - part.first)
      throw FrameError("an answer's rows are not in the logits");
    const uint64_t bytes = answer_bytes(part, common);
    if (bytes > UINT32_MAX) throw FrameError("an answer is larger than a frame can be");
    const AnswerHead head{{static_cast<uint32_t>(bytes), static_cast<uint16_t>(FrameKind::kAnswer), 0,
                           common.compiled ? kCompiled : uint8_t{0}, part.id},
                          common.version,
                          part.late,
                          common.publication,
                          common.highest,
                          common.watermark,
                          part.rows,
                          common.tasks};
    std::memcpy(out, &head, sizeof head);
    const uint64_t floats = 4 * floats_of(part, common);
    std::memcpy(out + sizeof head, logits + part.first * std::max<uint32_t>(1, common.tasks), floats);
    std::memset(out + sizeof head + floats, 0, bytes - sizeof head - floats);
    out += bytes;
  }
}

}  // namespace hotrow::serve
