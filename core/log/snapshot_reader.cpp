// Reads a snapshot folder record by record. The constructor checks all headers and file sizes. A block is verified when
// it is read; blocks without a live record are not read.
#include <algorithm>
#include <bit>
#include <cstring>

#include "log/log.h"
#include "log/manifest.h"
#include "segment/record_reader.h"

namespace hotrow {
namespace {

constexpr size_t kMostBytesAtOnce = size_t{64} << 20;
constexpr int kDepth = 128;

}  // namespace

struct SnapshotReader::State {
  using Segments = std::map<uint64_t, LiveSet::Part>;

  explicit State(const std::string& folder_)
      : folder(folder_),
        manifest(read_manifest(folder)),
        geometry(geometry_of(manifest.row_bytes, manifest.row_type)),
        reader(geometry, kDepth),
        position{manifest.set.segments.begin()} {
    for (const auto& [number, part] : manifest.set.segments) open(number);
  }

  std::shared_ptr<const File> open(uint64_t number) const {
    return open_segment(folder + "/" + segment_name(number), geometry, manifest.id(number),
                        manifest.set.segments.at(number).records);
  }

  // Where the search for the next live record continues.
  struct Position {
    Segments::const_iterator at;
    uint32_t record = 0;
    std::shared_ptr<const File> file = nullptr;  // once a record of the segment was taken
  };

  // Adds the current segment's next live records, until `places` has `most`.
  void take(size_t most, std::vector<RecordAddress>& places) {
    const LiveSet::Part& part = position.at->second;
    uint32_t& record = position.record;
    while (record < part.records && places.size() < most) {
      const uint64_t rest = part.bits[record / 64] >> (record % 64);
      if (rest == 0) {
        record = record / 64 * 64 + 64;
        continue;
      }
      record += static_cast<uint32_t>(std::countr_zero(rest));
      places.push_back(position.at->first << kRecordBits | record++);
    }
  }

  void read(const std::vector<RecordAddress>& places, const std::vector<SegmentRequests>& runs) {
    std::vector<RecordRequest>& wanted = reader.wanted;
    wanted.resize(places.size());
    for (size_t i = 0; i < places.size(); ++i) wanted[i] = make_request(places[i], i);
    records.resize(places.size() * geometry.record_bytes);
    reader.read(wanted, runs, records.data());
  }

  std::string folder;
  Manifest manifest;
  Geometry geometry;
  RecordReader reader;
  Position position;
  std::vector<char> records;
};

SnapshotReader::SnapshotReader(const std::string& folder) : state_(std::make_unique<State>(folder)) {}
SnapshotReader::~SnapshotReader() = default;

const std::string& SnapshotReader::table() const { return state_->manifest.table; }
uint32_t SnapshotReader::row_bytes() const { return state_->manifest.row_bytes; }
uint32_t SnapshotReader::row_type() const { return state_->manifest.row_type; }
uint64_t SnapshotReader::rows() const { return state_->manifest.set.live(); }

size_t SnapshotReader::next(size_t most, std::vector<RecordHead>& heads, std::vector<char>& values,
                            std::vector<RecordAddress>& places) {
  State& state = *state_;
  const size_t record_bytes = state.geometry.record_bytes, row_bytes = state.geometry.row_bytes;
  most = std::min({most, kMaxRequests, std::max<size_t>(1, kMostBytesAtOnce / record_bytes)});
  places.clear();
  std::vector<SegmentRequests> runs;
  const State::Position before = state.position;
  const auto end = state.manifest.set.segments.end();
  try {
    while (places.size() < most && state.position.at != end) {
      auto& [at, record, file] = state.position;
      const size_t begin = places.size();
      state.take(most, places);
      if (!file) file = state.open(at->first);
      if (places.size() > begin) runs.push_back({file, state.manifest.id(at->first).seed(), begin, places.size()});
      if (record >= at->second.records) state.position = {std::next(at)};
    }
    state.read(places, runs);
  } catch (...) {
    state.position = before;  // the next call tries the same records
    throw;
  }
  const size_t count = places.size();
  heads.resize(count);
  values.resize(count * row_bytes);
  for (size_t i = 0; i < count; ++i) {
    const char* const from = state.records.data() + i * record_bytes;
    std::memcpy(&heads[i], from, sizeof(RecordHead));
    std::memcpy(values.data() + i * row_bytes, from + sizeof(RecordHead), row_bytes);
  }
  return count;
}

}  // namespace hotrow
