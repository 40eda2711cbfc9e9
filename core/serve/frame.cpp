#include "serve/frame.h"

#include <cstring>

namespace hotrow::serve {
namespace {

uint64_t padded(uint64_t bytes) { return (bytes + 7) & ~uint64_t{7}; }

template <class T>
T load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// Reads a frame's bytes from front to back and throws at its end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  const uint8_t* take(uint64_t bytes, const char* what) {
    if (bytes > left_)
      throw FrameError("frame ends inside its " + std::string(what) + ": " + std::to_string(bytes) + " bytes wanted, " +
                       std::to_string(left_) + " left");
    const uint8_t* begin = at_;
    at_ += bytes;
    left_ -= bytes;
    return begin;
  }
  uint64_t left() const { return left_; }

 private:
  const uint8_t* at_;
  uint64_t left_;
};

void check_offsets(const uint8_t* offsets, uint32_t rows, uint32_t count) {
  int64_t before = 0;
  if (read_int64(offsets) != 0) throw FrameError("offsets do not start at 0");
  for (uint32_t row = 1; row <= rows; ++row) {
    const int64_t here = read_int64(offsets + 8 * uint64_t{row});
    if (here < before) throw FrameError("offsets decrease");
    before = here;
  }
  if (before != count) throw FrameError("offsets do not end at the number of ids");
}

FeatureView take_feature(Bytes& bytes, const FeatureHead& head, uint32_t rows) {
  if (head.kind > static_cast<uint8_t>(IdsKind::kShared) || head.weighted > 1)
    throw FrameError("a feature of unknown kind " + std::to_string(head.kind));
  FeatureView view{nullptr, nullptr, nullptr, head.count, static_cast<IdsKind>(head.kind)};
  if (view.kind == IdsKind::kOnePerRow && head.count != rows)
    throw FrameError("a feature with one id per row has " + std::to_string(head.count) + " ids for " +
                     std::to_string(rows) + " rows");
  view.values = bytes.take(8 * uint64_t{head.count}, "values");
  if (view.kind == IdsKind::kJagged) {
    view.offsets = bytes.take(8 * (uint64_t{rows} + 1), "offsets");
    check_offsets(view.offsets, rows, head.count);
  }
  if (head.weighted) view.weights = bytes.take(padded(4 * uint64_t{head.count}), "weights");
  return view;
}

}  // namespace

FrameHead read_head(const uint8_t* data) { return load<FrameHead>(data); }
int64_t read_int64(const uint8_t* data) { return load<int64_t>(data); }

void RequestView::parse(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  head = load<RequestHead>(bytes.take(sizeof(RequestHead), "head"));
  if (head.frame.length != size) throw FrameError("frame's length is not that of its bytes");
  if (head.frame.kind != static_cast<uint16_t>(FrameKind::kRequest)) throw FrameError("frame is not a request");
  if (head.rows == 0) throw FrameError("request without rows");
  packed = dense = nullptr;
  features.clear();
  joined_ids = 0;
  if (is_packed()) {
    // rows and features are below 2^32 each, so the product fits; times 8 it might not.
    const uint64_t keys = uint64_t{head.rows} * head.features;
    if (keys > bytes.left() / 8) throw FrameError("frame ends inside its keys");
    packed = bytes.take(8 * keys, "keys");
    joined_ids = keys;
  } else {
    const uint8_t* heads = bytes.take(sizeof(FeatureHead) * uint64_t{head.features}, "feature heads");
    features.reserve(head.features);
    for (uint32_t i = 0; i < head.features; ++i) {
      features.push_back(take_feature(bytes, load<FeatureHead>(heads + sizeof(FeatureHead) * uint64_t{i}), head.rows));
      const bool shared = features.back().kind == IdsKind::kShared;
      joined_ids += uint64_t{features.back().count} * (shared ? head.rows : 1);
      // 2^32 features of 2^64 ids would overflow. No valid request is near this limit.
      if (joined_ids > uint64_t{1} << 40) throw FrameError("shared ids times rows are more than 2^40");
    }
  }
  if (head.dense) {
    const uint64_t rows = head.frame.flags & kDenseShared ? 1 : head.rows;
    if (rows * head.dense > bytes.left() / 4) throw FrameError("frame ends inside its dense features");
    dense = bytes.take(padded(4 * rows * head.dense), "dense features");
  }
  if (bytes.left()) throw FrameError(std::to_string(bytes.left()) + " bytes after the end of a request");
}

}  // namespace hotrow::serve
