#include "segment/segment.h"

#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "hash/hash.h"
#include "io/aligned_memory.h"

namespace hotrow {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");
static_assert(kSegmentHeadBytes % kIoAlign == 0 && sizeof(SegmentHeader) <= kSegmentHeadBytes);
static_assert(offsetof(SegmentHeader, version) == 16 && offsetof(SegmentHeader, name_bytes) == 36);
static_assert(offsetof(SegmentHeader, segment) == 40 && offsetof(SegmentHeader, origin) == 48);
static_assert(offsetof(SegmentHeader, row_type) == 56 && offsetof(SegmentHeader, name) == 64);
static_assert(offsetof(BlockHead, block) == 8 && offsetof(BlockHead, records) == 12);

constexpr char kMagic[9] = "HOTROWSG";
constexpr uint32_t kMostBlockBytes = 64 << 10;  // unless a single record is larger

// Over the bytes after the magic and the checksum.
uint64_t header_checksum(const char* block) { return hash_bytes(block + 16, kSegmentHeadBytes - 16, 0); }

uint64_t block_checksum(const Geometry& geometry, uint64_t seed, const char* block) {
  return hash_bytes(block + 8, geometry.block_bytes - 8, seed);
}

[[noreturn]] void damaged(const std::string& path, const std::string& fact) {
  throw CorruptFile("segment '" + path + "' " + fact + "; restore it from another copy or use another checkpoint");
}

void check_header(const char* block, const Geometry& geometry, const SegmentId& id, const std::string& path) {
  const SegmentHead found = read_header(block, path);
  if (found.geometry.row_bytes != geometry.row_bytes)
    damaged(path, "has rows of " + std::to_string(found.geometry.row_bytes) + " bytes but its snapshot has rows of " +
                      std::to_string(geometry.row_bytes));
  if (found.geometry.row_type != geometry.row_type)
    damaged(path, "has rows of type " + std::to_string(found.geometry.row_type) + " but its snapshot has type " +
                      std::to_string(geometry.row_type));
  if (found.id != id)
    damaged(path, "is number " + std::to_string(found.id.number) + " of table '" + found.id.table +
                      "', not the file that its snapshot was made with");
}

}  // namespace

Geometry geometry_of(uint32_t row_bytes, uint32_t row_type) {
  if (row_bytes == 0 || row_bytes > kMostRowBytes)
    throw std::invalid_argument("rows of " + std::to_string(row_bytes) + " bytes; a log has rows of 1 to " +
                                std::to_string(kMostRowBytes));
  const uint32_t record = static_cast<uint32_t>(sizeof(RecordHead)) + row_bytes;
  const auto with_block = [&](uint32_t block) {
    return Geometry{row_bytes, record, block, (block - static_cast<uint32_t>(sizeof(BlockHead))) / record, row_type};
  };
  for (uint32_t block = kIoAlign; block <= kMostBlockBytes; block += kIoAlign) {
    const Geometry geometry = with_block(block);
    const uint32_t waste = block - static_cast<uint32_t>(sizeof(BlockHead)) - geometry.records_per_block * record;
    if (waste <= block / 4) return geometry;
  }
  const uint32_t needed = static_cast<uint32_t>(sizeof(BlockHead)) + record;
  return with_block((needed + kIoAlign - 1) / kIoAlign * kIoAlign);
}

uint64_t SegmentId::seed() const { return cross(cross(hash_bytes(table.data(), table.size(), 0), number), origin); }

std::string segment_name(uint64_t number) {
  char name[40];
  std::snprintf(name, sizeof(name), "segment-%010llu.hrs", static_cast<unsigned long long>(number));
  return name;
}

std::optional<uint64_t> segment_number(const std::string& name) {
  unsigned long long number = 0;
  if (std::sscanf(name.c_str(), "segment-%10llu", &number) != 1 || segment_name(number) != name) return std::nullopt;
  return number;
}

void write_header(const Geometry& geometry, const SegmentId& id, char* into) {
  SegmentHeader header{};
  std::memcpy(header.magic, kMagic, 8);
  header.version = geometry.row_type ? kTypedSegmentVersion : kSegmentVersion;
  header.row_bytes = geometry.row_bytes;
  header.record_bytes = geometry.record_bytes;
  header.block_bytes = geometry.block_bytes;
  header.records_per_block = geometry.records_per_block;
  header.name_bytes = static_cast<uint32_t>(id.table.size());
  header.segment = id.number;
  header.origin = id.origin;
  header.row_type = geometry.row_type;
  std::memcpy(header.name, id.table.data(), id.table.size());
  std::memset(into, 0, kSegmentHeadBytes);
  std::memcpy(into, &header, sizeof(header));
  header.checksum = header_checksum(into);
  std::memcpy(into, &header, sizeof(header));
}

SegmentHead read_header(const char* block, const std::string& path) {
  SegmentHeader header;
  std::memcpy(&header, block, sizeof(header));
  if (std::memcmp(header.magic, kMagic, 8) != 0) damaged(path, "does not begin like a segment");
  if (header.version != kSegmentVersion && header.version != kTypedSegmentVersion)
    throw CorruptFile("segment '" + path + "' has version " + std::to_string(header.version) +
                      " but this HotRow reads up to " + std::to_string(kTypedSegmentVersion) + "; use a newer HotRow");
  if (header.checksum != header_checksum(block)) damaged(path, "has a damaged header");
  const bool possible = header.row_bytes > 0 && header.row_bytes <= kMostRowBytes;
  const Geometry geometry = possible ? geometry_of(header.row_bytes, header.row_type) : Geometry{};
  if (header.record_bytes != geometry.record_bytes || header.block_bytes != geometry.block_bytes ||
      header.records_per_block != geometry.records_per_block || header.name_bytes > kMostNameBytes || !possible)
    damaged(path, "has a header with inconsistent sizes");
  if ((header.version == kTypedSegmentVersion) != (header.row_type != 0))
    damaged(path, "has a row type that its version does not allow");
  return {geometry, {std::string(header.name, header.name_bytes), header.segment, header.origin}};
}

void finish_block(const Geometry& geometry, uint64_t seed, uint32_t block, uint32_t records, char* bytes) {
  const size_t used = sizeof(BlockHead) + size_t{records} * geometry.record_bytes;
  std::memset(bytes + used, 0, geometry.block_bytes - used);
  BlockHead head{0, block, records};
  std::memcpy(bytes, &head, sizeof(head));
  head.checksum = block_checksum(geometry, seed, bytes);
  std::memcpy(bytes, &head, sizeof(head));
}

void check_block(const Geometry& geometry, uint64_t seed, uint32_t block, uint32_t records, const char* bytes,
                 const std::string& path) {
  BlockHead head;
  std::memcpy(&head, bytes, sizeof(head));
  if (head.checksum != block_checksum(geometry, seed, bytes))
    damaged(path, "is damaged in block " + std::to_string(block) + " (its checksum does not match)");
  if (head.block != block)
    damaged(path, "has block " + std::to_string(head.block) + " in the place of block " + std::to_string(block));
  if (head.records < records || head.records > geometry.records_per_block)
    damaged(path, "has " + std::to_string(head.records) + " records in block " + std::to_string(block) +
                      " and should have " + std::to_string(records));
}

std::unique_ptr<File> open_segment(const std::string& path, const Geometry& geometry, const SegmentId& id,
                                   uint32_t records) {
  if (!files().exists(path)) damaged(path, "is missing");
  auto file = files().open(path, OpenMode::kReadDirect);
  const uint64_t size = file->size(), needed = geometry.file_bytes(records);
  if (size >= kSegmentHeadBytes) {
    const Aligned header = allocate_aligned(kSegmentHeadBytes);
    file->read(0, header.get(), kSegmentHeadBytes);
    check_header(header.get(), geometry, id, path);
  }
  if (size < needed)
    damaged(path, "has " + std::to_string(size) + " bytes but its " + std::to_string(records) + " records take " +
                      std::to_string(needed));
  return file;
}

}  // namespace hotrow
