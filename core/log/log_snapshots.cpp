// Snapshots of a log: export to a folder, by hard links where possible, and import of a folder into an empty log.
#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "log/log.h"
#include "log/log_state.h"
#include "log/manifest.h"

namespace hotrow {
namespace {

// Whether the older snapshot's file is the same segment. A damaged file is not used.
bool is_same_segment(const std::string& path, const Geometry& geometry, const SegmentId& id, uint32_t records) {
  if (!files().exists(path)) return false;
  try {
    open_segment(path, geometry, id, records);
    return true;
  } catch (const CorruptFile&) {
    return false;
  }
}

}  // namespace

LiveSet Log::begin_snapshot() {
  std::lock_guard lock(state_->mutex);
  LiveSet set;
  for (const auto& [number, segment] : state_->segments)
    if (segment.live > 0) set.segments[number] = {segment.records, segment.live, segment.bits};
  ++state_->snapshots;
  return set;
}

void Log::end_snapshot() {
  std::lock_guard lock(state_->mutex);
  if (state_->snapshots == 0) throw std::logic_error("end_snapshot() without begin_snapshot()");
  --state_->snapshots;
}

uint64_t Log::export_snapshot(const LiveSet& set, const std::string& folder, const std::string& previous) {
  State& state = *state_;
  state.throw_if_failed();
  Manifest manifest{options_.table, options_.row_bytes, {}, {}, options_.row_type};
  {
    std::lock_guard lock(state.mutex);
    for (const auto& [number, part] : set.segments) {
      if (part.live == 0) continue;
      const LogSegment& segment = state.segment(number);
      if (!segment.sealed || part.records > segment.records)
        throw std::logic_error(
            "segment " + std::to_string(number) + " of table '" + options_.table +
            "' is not sealed with all records of the snapshot; call seal() before export_snapshot()");
      manifest.set.segments.emplace(number, part);
      manifest.origin.emplace(number, segment.id.origin);
    }
  }
  if (files().exists(folder)) throw IoError(EEXIST, "make folder", folder);

  const auto bring = [&](uint64_t number) -> uint64_t {
    const std::string name = segment_name(number), to = folder + "/" + name;
    if (files().link(state.path(number), to)) return 0;
    const std::string older = previous + "/" + name;
    if (!previous.empty() &&
        is_same_segment(older, state.geometry, manifest.id(number), manifest.set.segments[number].records) &&
        files().link(older, to))
      return 0;
    files().copy(state.path(number), to);
    return files().open(to, OpenMode::kRead)->size();
  };
  try {
    uint64_t copied = 0;
    files().make_folder(folder);
    for (const auto& [number, part] : manifest.set.segments) copied += bring(number);
    files().sync_folder(folder);
    write_manifest(folder, manifest);
    return copied;
  } catch (...) {
    ignore_io_error([&] { files().remove_folder(folder); });
    throw;
  }
}

void Log::import_snapshot(const std::string& folder) {
  State& state = *state_;
  if (!state.segments.empty()) throw std::logic_error("import_snapshot() into a log that has records");
  const Manifest manifest = read_manifest(folder);
  if (manifest.row_bytes != options_.row_bytes)
    throw std::invalid_argument("table '" + options_.table + "' has rows of " + std::to_string(options_.row_bytes) +
                                " bytes but the snapshot in '" + folder + "' has rows of " +
                                std::to_string(manifest.row_bytes) + "; use the dim and optimizer it was saved with");
  if (manifest.row_type != options_.row_type)
    throw std::invalid_argument("table '" + options_.table + "' has rows of type " + std::to_string(options_.row_type) +
                                " but the snapshot in '" + folder + "' has type " + std::to_string(manifest.row_type) +
                                "; use the values= it was saved with");
  if (manifest.table != options_.table)
    throw std::invalid_argument("the snapshot in '" + folder + "' is of table '" + manifest.table + "', not of '" +
                                options_.table + "'; pass that table's folder, or load its rows one by one");

  std::map<uint64_t, LogSegment> adopted;
  uint64_t next = state.next;
  try {
    // Written before the first link, so that a reader of the folder that finds the files also finds their live bits.
    const std::vector<char> bytes = encode(manifest);
    files().replace(adopted_path(state.folder), bytes.data(), bytes.size());
    for (const auto& [number, part] : manifest.set.segments) {
      const std::string from = folder + "/" + segment_name(number), to = state.path(number);
      const SegmentId id = manifest.id(number);
      open_segment(from, state.geometry, id, part.records);
      LogSegment& segment = adopted[number] = {id, to, nullptr, true, 0, part.records, part.live, part.bits};
      if (files().exists(to)) files().remove(to);  // left by a failed attempt
      if (!files().link(from, to)) files().copy(from, to);
      segment.file = open_segment(to, state.geometry, id, part.records);
      segment.bytes = segment.file->size();
      next = std::max(next, number + 1);
    }
  } catch (...) {
    const auto take_away = [](const std::string& path) {
      ignore_io_error([&] {
        if (files().exists(path)) files().remove(path);
      });
    };
    for (const auto& [number, segment] : adopted) take_away(segment.path);
    take_away(adopted_path(state.folder));
    throw;
  }
  std::lock_guard lock(state.mutex);
  state.segments = std::move(adopted);
  state.next = next;
}

}  // namespace hotrow
