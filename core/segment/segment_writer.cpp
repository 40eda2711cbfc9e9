#include "segment/segment_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hotrow {

SegmentWriter::SegmentWriter(const Geometry& geometry, size_t buffer_bytes, std::mutex& mutex)
    : geometry_(geometry), mutex_(mutex) {
  const size_t blocks = std::clamp<size_t>(buffer_bytes / geometry.block_bytes / 2, 1, geometry.blocks(kMostRecords));
  most_buffered_ = static_cast<uint32_t>(blocks * geometry.records_per_block);
  half_bytes_ = blocks * geometry.block_bytes;
  buffer_bytes_ = kSegmentHeadBytes + 2 * half_bytes_;
  buffer_ = allocate_aligned(buffer_bytes_);
}

void SegmentWriter::begin(const SegmentId& id, std::string path) {
  end();
  path_ = std::move(path);
  seed_ = id.seed();
  write_header(geometry_, id, buffer_.get());
}

void SegmentWriter::end() {
  file_.reset();
  written_ = writing_ = buffered_ = 0;
  filling_ = 0;
}

void SegmentWriter::append(const RecordHead& head, const void* values) {
  char* const into = block(filling_, buffered_ / geometry_.records_per_block) + geometry_.record_offset(buffered_);
  std::memcpy(into, &head, sizeof(head));
  std::memcpy(into + sizeof(head), values, geometry_.row_bytes);
  ++buffered_;
  // A full block gets its checksum now, while it is in the CPU cache, so that the write does not wait for it.
  const uint32_t each = geometry_.records_per_block;
  if (buffered_ % each == 0)
    finish_block(geometry_, seed_, records() / each - 1, each, block(filling_, buffered_ / each - 1));
}

const char* SegmentWriter::find(uint32_t record) const {
  const bool leaves = record < written_ + writing_;
  const uint32_t index = record - written_ - (leaves ? 0 : writing_);
  return block(leaves ? 1 - filling_ : filling_, index / geometry_.records_per_block) + geometry_.record_offset(index);
}

uint64_t SegmentWriter::flush_full_half() {
  const uint64_t bytes = finish_write();
  if (!file_) file_ = files().open(path_, OpenMode::kCreateDirect);
  {
    std::lock_guard lock(mutex_);
    writing_ = std::exchange(buffered_, 0);
    filling_ = 1 - filling_;
  }
  write_task_.start([this] { write_half(1 - filling_, written_, writing_); });
  return bytes;
}

uint64_t SegmentWriter::write() {
  const uint64_t bytes = finish_write();
  if (!file_) file_ = files().open(path_, OpenMode::kCreateDirect);
  return bytes + write_half(filling_, written_, buffered_);
}

uint64_t SegmentWriter::finish_write() {
  if (writing_ == 0) return 0;
  bool arrived = false;
  if (write_task_.started()) try {
      write_task_.finish();
      arrived = true;
    } catch (const IoError&) {
      // The disk may work again; if not, the write below throws.
    }
  if (!arrived) write_half(1 - filling_, written_, writing_);
  const uint64_t bytes = (written_ == 0 ? kSegmentHeadBytes : 0) + half_bytes_;
  std::lock_guard lock(mutex_);
  written_ += std::exchange(writing_, 0);
  return bytes;
}

// Writes `records` records of a half, after the segment's first `from` records. Only the last block may lack its head.
// Returns the bytes.
uint64_t SegmentWriter::write_half(int half, uint32_t from, uint32_t records) {
  const uint32_t each = geometry_.records_per_block, first = from / each;
  const uint32_t blocks = static_cast<uint32_t>(geometry_.blocks(records));
  if (records % each) finish_block(geometry_, seed_, first + blocks - 1, records % each, block(half, blocks - 1));
  const size_t bytes = size_t{blocks} * geometry_.block_bytes;
  if (from == 0) {
    file_->write(0, buffer_.get(), kSegmentHeadBytes + bytes);
    return kSegmentHeadBytes + bytes;
  }
  if (bytes > 0) file_->write(geometry_.block_offset(first), block(half, 0), bytes);
  return bytes;
}

}  // namespace hotrow
