#include "log/segment_writer.h"

#include <algorithm>
#include <cstring>

namespace hotrow {

SegmentWriter::SegmentWriter(const Geometry& geometry, size_t buffer_bytes) : geometry_(geometry) {
  const size_t blocks = std::clamp<size_t>(buffer_bytes / geometry.block_bytes, 1, geometry.blocks(kMostRecords));
  most_buffered_ = static_cast<uint32_t>(blocks * geometry.records_per_block);
  buffer_bytes_ = kSegmentHeadBytes + blocks * geometry.block_bytes;
  buffer_ = allocate_aligned(buffer_bytes_);
}

void SegmentWriter::begin(const SegmentId& id, std::string path) {
  path_ = std::move(path);
  seed_ = id.seed();
  file_.reset();
  written_ = buffered_ = 0;
  write_header(geometry_, id, buffer_.get());
}

void SegmentWriter::end() {
  file_.reset();
  written_ = buffered_ = 0;
}

void SegmentWriter::append(const RecordHead& head, const void* values) {
  char* const into = block(buffered_ / geometry_.records_per_block) + geometry_.record_offset(buffered_);
  std::memcpy(into, &head, sizeof(head));
  std::memcpy(into + sizeof(head), values, geometry_.row_bytes);
  ++buffered_;
}

const char* SegmentWriter::find(uint32_t record) const {
  return block((record - written_) / geometry_.records_per_block) + geometry_.record_offset(record);
}

uint64_t SegmentWriter::write() {
  if (!file_) file_ = files().open(path_, OpenMode::kCreateDirect);
  const uint32_t each = geometry_.records_per_block;
  const uint32_t first = written_ / each;
  const uint32_t blocks = static_cast<uint32_t>(geometry_.blocks(buffered_));
  for (uint32_t i = 0; i < blocks; ++i)
    finish_block(geometry_, seed_, first + i, std::min(each, buffered_ - i * each), block(i));
  const size_t bytes = size_t{blocks} * geometry_.block_bytes;
  if (written_ == 0) {
    file_->write(0, buffer_.get(), kSegmentHeadBytes + bytes);
    return kSegmentHeadBytes + bytes;
  }
  if (bytes > 0) file_->write(geometry_.block_offset(first), block(0), bytes);
  return bytes;
}

void SegmentWriter::advance() {
  written_ += buffered_;
  buffered_ = 0;
}

}  // namespace hotrow
