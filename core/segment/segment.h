// A segment file as bytes: a header block, then blocks of records. docs/formats/segments.md specifies it.
//
// Layout and checks are only here: the sizes that follow from a row's size, the header, a block's checksum, the file's
// name. The writer (segment_writer.h) and the reader (record_reader.h) both use these functions.
//
// A block's checksum is seeded by its table, segment number and origin. The origin is a random number, drawn when a log
// is opened. It distinguishes two files of the same table and number that different runs wrote into one folder, as
// after a resume from an older checkpoint.
//
// Threads: functions of their arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "io/files.h"
#include "segment/record.h"

namespace hotrow {

inline constexpr uint32_t kSegmentVersion = 1, kTypedSegmentVersion = 2;  // 2 if row_type is not 0
inline constexpr size_t kSegmentHeadBytes = 4096;
inline constexpr uint32_t kMostRecords = uint32_t{1} << kRecordBits;  // in a segment
inline constexpr uint64_t kMostSegments = kMaxAddresses >> kRecordBits;
inline constexpr uint32_t kMostRowBytes = uint32_t{16} << 20;
inline constexpr size_t kMostNameBytes = 256;

struct SegmentHeader {  // at the start of the file; zeros up to kSegmentHeadBytes
  char magic[8];
  uint64_t checksum;  // of every byte after it in the header block
  uint32_t version;
  uint32_t row_bytes;
  uint32_t record_bytes;
  uint32_t block_bytes;
  uint32_t records_per_block;
  uint32_t name_bytes;
  uint64_t segment;
  uint64_t origin;
  uint32_t row_type;  // LogOptions::row_type
  uint32_t zero;
  char name[kMostNameBytes];  // the table's, then zeros
};
static_assert(sizeof(SegmentHeader) == 320);

struct BlockHead {
  uint64_t checksum;  // of every byte after it in the block
  uint32_t block;     // its number in the segment, from 0
  uint32_t records;
};
static_assert(sizeof(BlockHead) == 16);

// What follows from the size of a row, and the type of its values.
struct Geometry {
  uint32_t row_bytes, record_bytes, block_bytes, records_per_block;
  uint32_t row_type = 0;

  uint64_t block_offset(uint64_t block) const { return kSegmentHeadBytes + block * block_bytes; }
  uint64_t blocks(uint64_t records) const { return (records + records_per_block - 1) / records_per_block; }
  uint64_t file_bytes(uint64_t records) const { return block_offset(blocks(records)); }
  // Of a record in its block.
  size_t record_offset(uint32_t record) const {
    return sizeof(BlockHead) + size_t{record % records_per_block} * record_bytes;
  }
};
// Throws std::invalid_argument for a row of no bytes or of more than kMostRowBytes.
Geometry geometry_of(uint32_t row_bytes, uint32_t row_type = 0);

// Identifies a segment.
struct SegmentId {
  std::string table;
  uint64_t number = 0, origin = 0;
  uint64_t seed() const;  // of its blocks' checksums
  bool operator==(const SegmentId&) const = default;
};

std::string segment_name(uint64_t number);
std::optional<uint64_t> segment_number(const std::string& name);  // none: not the name of a segment

// Writes the header block, kSegmentHeadBytes.
void write_header(const Geometry& geometry, const SegmentId& id, char* into);
// Reads a header block and checks it as far as it can be checked alone. Throws CorruptFile; `path` is for the error
// text.
struct SegmentHead {
  Geometry geometry;
  SegmentId id;
};
SegmentHead read_header(const char* block, const std::string& path);
// Writes the head of a block whose records are in place, and zeros after them.
void finish_block(const Geometry& geometry, uint64_t seed, uint32_t block, uint32_t records, char* bytes);
// Throws CorruptFile unless it is that block with at least that many records.
void check_block(const Geometry& geometry, uint64_t seed, uint32_t block, uint32_t records, const char* bytes,
                 const std::string& path);

// Opens a sealed segment for reading, and checks the header and that `records` fit into the file, not the blocks.
// Throws CorruptFile when it is missing or is not that segment.
std::unique_ptr<File> open_segment(const std::string& path, const Geometry& geometry, const SegmentId& id,
                                   uint32_t records);

}  // namespace hotrow
