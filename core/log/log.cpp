// Appending, reading, sealing and compaction of a log. Snapshots are in log_snapshots.cpp.
//
// append() makes room in the buffer before it assigns an address: if it throws, nothing was appended.
#include "log/log.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>

#include "hash/hash.h"
#include "log/log_state.h"
#include "log/manifest.h"

namespace hotrow {
namespace {

constexpr size_t kManySmall = 16;  // sealed segments under a quarter of the full size, before they are joined

// A different number for each log that is opened.
uint64_t draw_origin() {
  std::random_device device;
  const uint64_t now = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  return hash_int(now, uint64_t{device()} << 32 | device());
}

uint32_t most_records_of(const Geometry& geometry, uint64_t segment_bytes) {
  const uint64_t room = segment_bytes > kSegmentHeadBytes ? segment_bytes - kSegmentHeadBytes : 0;
  const uint64_t blocks = std::max<uint64_t>(1, room / geometry.block_bytes);
  return static_cast<uint32_t>(std::min<uint64_t>(kMostRecords, blocks * geometry.records_per_block));
}

[[noreturn]] void no_record(const std::string& table, RecordAddress place) {
  throw std::out_of_range("table '" + table + "' has no record " + std::to_string(record_of(place)) + " in segment " +
                          std::to_string(place >> kRecordBits) + " (it never existed, or its segment was removed)");
}

}  // namespace

Log::State::State(const LogOptions& options, const Geometry& geometry_)
    : geometry(geometry_),
      most_records(most_records_of(geometry_, options.segment_bytes)),
      origin(draw_origin()),
      folder(options.folder),
      table(options.table),
      writer(geometry_,
             std::min<uint64_t>(options.buffer_bytes, geometry_.blocks(most_records) * geometry_.block_bytes), mutex),
      readers(RecordReaderPool::shared(geometry_, options.depth)) {}

LogSegment& Log::State::segment(uint64_t number) {
  const auto found = segments.find(number);
  if (found == segments.end())
    throw std::out_of_range("table '" + table + "' has no segment " + std::to_string(number));
  return found->second;
}

void Log::State::begin_segment() {
  if (next >= kMostSegments)
    throw std::runtime_error("table '" + table + "' has used all " + std::to_string(kMostSegments) +
                             " segment numbers of '" + folder + "'; save a checkpoint and load it into a new folder");
  LogSegment segment;
  segment.id = {table, next, origin};
  segment.path = path(next);
  writer.begin(segment.id, segment.path);
  open = &segments.emplace(next, std::move(segment)).first->second;
  ++next;
}

void Log::State::throw_if_failed() const {
  std::lock_guard lock(mutex);
  if (failed) throw *failed;
}

Log::Log(LogOptions options) : options_(std::move(options)) {
  if (options_.table.size() > kMostNameBytes)
    throw std::invalid_argument("a table's name of " + std::to_string(options_.table.size()) + " bytes; use at most " +
                                std::to_string(kMostNameBytes));
  const Geometry geometry = geometry_of(options_.row_bytes, options_.row_type);
  record_bytes_ = geometry.record_bytes;
  block_bytes_ = geometry.block_bytes;
  records_per_block_ = geometry.records_per_block;
  state_ = std::make_unique<State>(options_, geometry);

  // MANIFEST is removed first, so that the files left by a crash here are no snapshot.
  files().make_folder(options_.folder);
  if (files().exists(manifest_path(options_.folder))) files().remove(manifest_path(options_.folder));
  for (const std::string& name : files().list(options_.folder)) {
    const auto number = segment_number(name);
    if (!number) continue;
    files().remove(options_.folder + "/" + name);
    if (*number < kMostSegments) state_->next = std::max(state_->next, *number + 1);
  }
  if (files().exists(adopted_path(options_.folder))) files().remove(adopted_path(options_.folder));
}

Log::~Log() = default;

RecordAddress Log::append(const RecordHead& head, const void* values, bool alive) {
  RecordAddress place;
  append(&head, &values, 1, &place, alive);
  return place;
}

size_t Log::append(const RecordHead* heads, const void* const* values, size_t count, RecordAddress* places,
                   bool alive) {
  State& state = *state_;
  if (state.open && state.open->records == state.most_records) seal();
  if (state.open && !state.writer.room()) state.bytes_written += state.writer.flush_full_half();
  std::lock_guard lock(state.mutex);
  if (!state.open) state.begin_segment();
  LogSegment& segment = *state.open;
  count = std::min<size_t>(count, std::min(state.writer.room(), state.most_records - segment.records));
  segment.bits.resize((segment.records + count + 63) / 64);
  for (size_t i = 0; i < count; ++i) {
    state.writer.append(heads[i], values[i]);
    const uint32_t record = segment.records++;
    if (alive) segment.bits[record / 64] |= uint64_t{1} << (record % 64);
    places[i] = segment.id.number << kRecordBits | record;
  }
  if (alive) segment.live += count;
  state.rows_written += count;
  return count;
}

void Log::mark_dead(RecordAddress place) {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->segments.find(place >> kRecordBits);
  const uint32_t record = record_of(place);
  if (found == state_->segments.end() || record >= found->second.records) no_record(options_.table, place);
  LogSegment& segment = found->second;
  if (!segment.alive(record)) return;
  segment.bits[record / 64] &= ~(uint64_t{1} << (record % 64));
  --segment.live;
}

bool Log::alive(RecordAddress place) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->segments.find(place >> kRecordBits);
  return found != state_->segments.end() && found->second.alive(record_of(place));
}

void Log::seal() {
  State& state = *state_;
  state.throw_if_failed();
  if (!state.open) return;
  const std::string path = state.open->path;
  state.bytes_written += state.writer.write();
  try {
    state.writer.file()->sync();
    files().sync_folder(state.folder);
  } catch (const IoError& error) {
    std::lock_guard lock(state.mutex);
    state.failed.emplace(error);
    throw *state.failed;
  }
  std::shared_ptr<const File> file = files().open(path, OpenMode::kReadDirect);
  std::lock_guard lock(state.mutex);
  state.open->file = std::move(file);
  state.open->sealed = true;
  state.open->bytes = state.geometry.file_bytes(state.open->records);
  state.open = nullptr;
  state.writer.end();
}

void Log::read(const RecordAddress* places, size_t count, char* records) const {
  State& state = *state_;
  for (; count > kMaxRequests; count -= kMaxRequests, places += kMaxRequests, records += kMaxRequests * record_bytes_)
    read(places, kMaxRequests, records);

  const auto reader = state.readers->acquire();
  std::vector<RecordRequest>& wanted = reader->wanted;
  wanted.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (places[i] >= kMaxAddresses) no_record(options_.table, places[i]);
    wanted[i] = make_request(places[i], i);
  }
  std::sort(wanted.begin(), wanted.end());

  std::vector<SegmentRequests> runs;
  {
    std::lock_guard lock(state.mutex);
    for (size_t begin = 0; begin < count;) {
      const uint64_t number = request_address(wanted[begin]) >> kRecordBits;
      const auto behind = [&](RecordAddress place) {
        const auto from = wanted.begin() + static_cast<std::ptrdiff_t>(begin);
        return static_cast<size_t>(std::lower_bound(from, wanted.end(), make_request(place, 0)) - wanted.begin());
      };
      const size_t end = behind((number + 1) << kRecordBits);
      const auto found = state.segments.find(number);
      const RecordAddress last = request_address(wanted[end - 1]);
      if (found == state.segments.end() || record_of(last) >= found->second.records) no_record(options_.table, last);
      const LogSegment& segment = found->second;
      const bool writing = &segment == state.open;
      const size_t in_file = writing ? behind(number << kRecordBits | state.writer.written()) : end;
      if (in_file > begin)
        runs.push_back({writing ? state.writer.file() : segment.file, segment.id.seed(), begin, in_file});
      for (size_t i = in_file; i < end; ++i)
        std::memcpy(records + request_index(wanted[i]) * record_bytes_,
                    state.writer.find(record_of(request_address(wanted[i]))), record_bytes_);
      begin = end;
    }
  }
  const uint64_t blocks = reader->read(wanted, runs, records);
  state.blocks_read += blocks;
  state.bytes_read += blocks * block_bytes_;
  state.rows_read += count;
}

int64_t Log::pick_for_compaction() const {
  std::lock_guard lock(state_->mutex);
  const LogSegment *emptiest = nullptr, *smallest = nullptr;
  size_t small = 0;
  for (const auto& [number, segment] : state_->segments) {
    if (!segment.sealed || segment.live == 0) continue;  // remove_dead_segments() removes a dead one
    const auto share_is_less = [&] { return segment.live * emptiest->records < emptiest->live * segment.records; };
    if (segment.live * 2 < segment.records && (!emptiest || share_is_less())) emptiest = &segment;
    if (segment.bytes >= options_.segment_bytes / 4) continue;
    ++small;
    if (!smallest || segment.bytes < smallest->bytes) smallest = &segment;
  }
  if (emptiest) return static_cast<int64_t>(emptiest->id.number);
  return small > kManySmall ? static_cast<int64_t>(smallest->id.number) : -1;
}

std::vector<RecordAddress> Log::live_places(uint64_t number) const {
  std::lock_guard lock(state_->mutex);
  const LogSegment& segment = state_->segment(number);
  std::vector<RecordAddress> places;
  places.reserve(segment.live);
  for (uint32_t record = 0; record < segment.records; ++record)
    if (segment.alive(record)) places.push_back(number << kRecordBits | record);
  state_->compacted_bytes += places.size() * record_bytes_;
  return places;
}

int Log::remove_dead_segments() {
  State& state = *state_;
  std::vector<std::pair<uint64_t, std::string>> dead;
  {
    std::lock_guard lock(state.mutex);
    if (state.snapshots > 0) return 0;
    for (const auto& [number, segment] : state.segments)
      if (segment.sealed && segment.live == 0) dead.emplace_back(number, segment.path);
  }
  for (const auto& [number, path] : dead) {
    files().remove(path);
    std::lock_guard lock(state.mutex);
    state.segments.erase(number);
  }
  return static_cast<int>(dead.size());
}

size_t Log::trim() { return state_->readers->trim(); }

LogReport Log::report() const {
  const State& state = *state_;
  LogReport report{};
  std::lock_guard lock(state.mutex);
  report.ram_bytes =
      state.writer.ram_bytes() + state.readers->ram_bytes() / std::max<size_t>(1, state.readers.use_count());
  for (const auto& [number, segment] : state.segments) {
    ++report.segments;
    report.records += segment.records;
    report.live += segment.live;
    const bool written = segment.sealed || state.writer.written() > 0;
    report.disk_bytes += segment.sealed ? segment.bytes
                         : written      ? state.geometry.file_bytes(state.writer.written())
                                        : 0;
    report.ram_bytes += sizeof(segment) + segment.path.capacity() + segment.bits.capacity() * sizeof(uint64_t);
  }
  report.live_bytes = report.live * record_bytes_;
  report.bytes_written = state.bytes_written;
  report.rows_written = state.rows_written;
  report.bytes_read = state.bytes_read;
  report.blocks_read = state.blocks_read;
  report.rows_read = state.rows_read;
  report.compacted_bytes = state.compacted_bytes;
  return report;
}

}  // namespace hotrow
