// MANIFEST: the file that makes a folder of segments a snapshot. It lists the live records of each segment.
//
// It is written last and atomically (Files::replace): a folder without one is not a snapshot. Its checksum covers every
// byte after it. Each segment is identified by number and origin, so a segment file from another snapshot is detected.
// Format: docs/formats/segments.md.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "log/log.h"
#include "segment/segment.h"

namespace hotrow {

inline constexpr uint32_t kManifestVersion = 1, kTypedManifestVersion = 2;  // 2 if row_type is not 0

struct ManifestHead {
  char magic[8];
  uint64_t checksum;  // of every byte after it
  uint32_t version;
  uint32_t row_bytes;
  uint16_t name_bytes;  // of the table's name, which follows this head, with zeros up to a multiple of 8
  uint16_t row_type;
  uint32_t segments;  // ManifestEntries after the name, each followed by its bits
  uint64_t live;      // live records of all segments
};
static_assert(sizeof(ManifestHead) == 40);

struct ManifestEntry {
  uint64_t segment;
  uint64_t origin;
  uint32_t records;  // then one bit each, in words of 64
  uint32_t live;
};
static_assert(sizeof(ManifestEntry) == 24);

struct Manifest {
  std::string table;
  uint32_t row_bytes = 0;
  LiveSet set;                          // without segments that have no live record
  std::map<uint64_t, uint64_t> origin;  // of each segment in the set
  uint32_t row_type = 0;

  SegmentId id(uint64_t segment) const { return {table, segment, origin.at(segment)}; }
};

std::string manifest_path(const std::string& folder);
// In a log's folder: the manifest of the snapshot that the log began with, for reading the folder without the log.
// Segments that it does not name (by number and origin) were written since. It may be older than the log; then it names
// none of the existing files.
std::string adopted_path(const std::string& folder);
std::vector<char> encode(const Manifest& manifest);
// Throws CorruptFile; `path` is for the message.
Manifest decode(const std::vector<char>& bytes, const std::string& path);

void write_manifest(const std::string& folder, const Manifest& manifest);
Manifest read_manifest(const std::string& folder);

}  // namespace hotrow
