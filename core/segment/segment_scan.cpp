#include "segment/segment_scan.h"

#include <algorithm>
#include <cstring>

namespace hotrow {
namespace {

constexpr size_t kBufferBytes = size_t{4} << 20;

}  // namespace

SegmentScan::SegmentScan(const std::string& path) : file_(files().open(path, OpenMode::kReadDirect)) {
  bytes_ = file_->size();
  if (bytes_ < kSegmentHeadBytes)
    throw CorruptFile("segment '" + path + "' has " + std::to_string(bytes_) + " bytes, less than a header");
  const Aligned block = allocate_aligned(kSegmentHeadBytes);
  file_->read(0, block.get(), kSegmentHeadBytes);
  head_ = read_header(block.get(), path);
  seed_ = head_.id.seed();
  const Geometry& geometry = head_.geometry;
  blocks_ = std::min((bytes_ - kSegmentHeadBytes) / geometry.block_bytes, geometry.blocks(kMostRecords));
  buffered_ = std::max<size_t>(1, kBufferBytes / geometry.block_bytes);
  buffer_ = allocate_aligned(buffered_ * geometry.block_bytes);
}

bool SegmentScan::is_intact(uint32_t block, const char* bytes) const {
  try {
    check_block(head_.geometry, seed_, block, 1, bytes, file_->path());
    return true;
  } catch (const CorruptFile&) {
    return false;
  }
}

size_t SegmentScan::next(std::vector<RecordHead>& heads, std::vector<char>& values, std::vector<uint32_t>& numbers) {
  const Geometry& geometry = head_.geometry;
  heads.clear();
  values.clear();
  numbers.clear();
  while (heads.empty() && next_ < blocks_) {
    const size_t count = std::min<uint64_t>(buffered_, blocks_ - next_);
    file_->read(geometry.block_offset(next_), buffer_.get(), count * geometry.block_bytes);
    for (size_t i = 0; i < count; ++i) {
      const auto block = static_cast<uint32_t>(next_ + i);
      const char* const bytes = buffer_.get() + i * geometry.block_bytes;
      if (!is_intact(block, bytes)) {
        bad_.push_back(block);
        continue;
      }
      BlockHead head;
      std::memcpy(&head, bytes, sizeof(head));
      for (uint32_t record = 0; record < head.records; ++record) {
        const char* const from = bytes + geometry.record_offset(record);
        std::memcpy(&heads.emplace_back(), from, sizeof(RecordHead));
        values.insert(values.end(), from + sizeof(RecordHead), from + geometry.record_bytes);
        numbers.push_back(block * geometry.records_per_block + record);
      }
    }
    next_ += count;
  }
  return heads.size();
}

}  // namespace hotrow
