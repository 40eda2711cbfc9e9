#include "log/manifest.h"

#include <bit>
#include <cstddef>
#include <cstring>

#include "hash/hash.h"

namespace hotrow {
namespace {

static_assert(offsetof(ManifestHead, version) == 16 && offsetof(ManifestHead, live) == 32);
static_assert(offsetof(ManifestEntry, records) == 16 && offsetof(ManifestEntry, live) == 20);

constexpr char kMagic[9] = "HOTROWMF";

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

uint64_t checksum_of(const std::vector<char>& bytes) { return hash_bytes(bytes.data() + 16, bytes.size() - 16, 0); }

void put(std::vector<char>& bytes, const void* from, size_t count) {
  const size_t at = bytes.size();
  bytes.resize(at + count);
  if (count) std::memcpy(bytes.data() + at, from, count);
}

[[noreturn]] void damaged(const std::string& path, const std::string& fact) {
  throw CorruptFile("'" + path + "' " + fact + "; restore it from another copy or use another checkpoint");
}

// Reads a manifest from front to back, and never past its end.
class Parts {
 public:
  Parts(const std::vector<char>& bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  const char* take(size_t count) {
    if (count > bytes_.size() - at_) damaged(path_, "is shorter than what it lists");
    at_ += count;
    return bytes_.data() + at_ - count;
  }
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  const std::vector<char>& bytes_;
  const std::string& path_;
  size_t at_ = 0;
};

void check_part(const LiveSet::Part& part, uint32_t live, const std::string& path) {
  uint64_t counted = 0;
  for (uint64_t word : part.bits) counted += static_cast<uint64_t>(std::popcount(word));
  const bool bit_behind_the_end = part.records % 64 != 0 && part.bits.back() >> (part.records % 64) != 0;
  if (counted != live || counted == 0 || bit_behind_the_end)
    damaged(path, "has live bits that do not match its counts");
}

}  // namespace

std::string manifest_path(const std::string& folder) { return folder + "/MANIFEST"; }
std::string adopted_path(const std::string& folder) { return folder + "/ADOPTED"; }

std::vector<char> encode(const Manifest& manifest) {
  ManifestHead head{};
  std::memcpy(head.magic, kMagic, 8);
  head.version = manifest.row_type ? kTypedManifestVersion : kManifestVersion;
  head.row_bytes = manifest.row_bytes;
  head.name_bytes = static_cast<uint16_t>(manifest.table.size());
  head.row_type = static_cast<uint16_t>(manifest.row_type);
  head.segments = static_cast<uint32_t>(manifest.set.segments.size());
  head.live = manifest.set.live();
  std::vector<char> bytes;
  put(bytes, &head, sizeof(head));
  put(bytes, manifest.table.data(), manifest.table.size());
  bytes.resize(padded(bytes.size()));
  for (const auto& [segment, part] : manifest.set.segments) {
    const ManifestEntry entry{segment, manifest.origin.at(segment), part.records, static_cast<uint32_t>(part.live)};
    put(bytes, &entry, sizeof(entry));
    put(bytes, part.bits.data(), part.bits.size() * sizeof(uint64_t));
  }
  head.checksum = checksum_of(bytes);
  std::memcpy(bytes.data(), &head, sizeof(head));
  return bytes;
}

Manifest decode(const std::vector<char>& bytes, const std::string& path) {
  Parts parts(bytes, path);
  const auto head = parts.take<ManifestHead>();
  if (std::memcmp(head.magic, kMagic, 8) != 0) damaged(path, "does not begin like a MANIFEST");
  if (head.version != kManifestVersion && head.version != kTypedManifestVersion)
    throw CorruptFile("'" + path + "' has version " + std::to_string(head.version) + " but this HotRow reads up to " +
                      std::to_string(kTypedManifestVersion) + "; use a newer HotRow");
  if (head.checksum != checksum_of(bytes)) damaged(path, "is damaged (its checksum does not match)");
  if (head.name_bytes > kMostNameBytes || head.row_bytes == 0 || head.row_bytes > kMostRowBytes ||
      (head.version == kTypedManifestVersion) != (head.row_type != 0))
    damaged(path, "has impossible sizes");

  Manifest manifest;
  manifest.row_bytes = head.row_bytes;
  manifest.row_type = head.row_type;
  manifest.table.assign(parts.take(padded(head.name_bytes)), head.name_bytes);
  uint64_t after = 0;  // segments come in order, each once
  for (uint32_t i = 0; i < head.segments; ++i) {
    const auto entry = parts.take<ManifestEntry>();
    if (entry.segment < after || entry.segment >= kMostSegments || entry.records == 0 || entry.records > kMostRecords)
      damaged(path, "lists impossible segments");
    after = entry.segment + 1;
    LiveSet::Part part{entry.records, entry.live, std::vector<uint64_t>((entry.records + 63) / 64)};
    const size_t bits_bytes = part.bits.size() * sizeof(uint64_t);
    std::memcpy(part.bits.data(), parts.take(bits_bytes), bits_bytes);
    check_part(part, entry.live, path);
    manifest.set.segments.emplace(entry.segment, std::move(part));
    manifest.origin.emplace(entry.segment, entry.origin);
  }
  if (!parts.at_end() || manifest.set.live() != head.live) damaged(path, "has inconsistent counts");
  return manifest;
}

void write_manifest(const std::string& folder, const Manifest& manifest) {
  const std::vector<char> bytes = encode(manifest);
  files().replace(manifest_path(folder), bytes.data(), bytes.size());
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  if (!files().exists(path))
    throw CorruptFile("'" + path + "' is missing: the folder holds no finished snapshot; use another checkpoint");
  return decode(files().read_all(path), path);
}

}  // namespace hotrow
