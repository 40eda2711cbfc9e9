#include "log/places_reader.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

namespace hotrow {
namespace {

constexpr size_t kLanes = 4;
constexpr size_t kLaneBytes = size_t{256} << 10;
constexpr size_t kMostJoined = size_t{128} << 10;
constexpr size_t kMostReaders = 8;

void check_request(const ReadRequest& request) {
  if (request.error == 0) return;
  const std::string& path = request.file->path();
  if (request.error > 0) throw IoError(request.error, "read", path);
  throw CorruptFile("segment '" + path + "' ends before byte " + std::to_string(request.offset + request.bytes) +
                    "; restore it from another copy or use another checkpoint");
}

}  // namespace

uint64_t PlacesReader::read(const std::vector<Wanted>& wanted, const std::vector<WantedRun>& runs, char* records) {
  Cursor cursor{0, runs.empty() ? 0 : runs[0].begin};
  uint64_t blocks = 0;
  try {
    size_t started = 0, finished = 0;
    while (true) {
      for (; started < finished + kLanes && cursor.run < runs.size(); ++started) {
        Lane& next = lane(started % kLanes);
        start(next, wanted, runs, cursor);
        blocks += next.pieces.size();
      }
      if (finished == started) break;
      finish(lanes_[finished++ % kLanes], wanted, records);
    }
  } catch (...) {
    for (Lane& each : lanes_) each.reader->wait();  // the memory is used again
    throw;
  }
  ram_bytes_ = lanes_.size() * lane_bytes() + this->wanted.capacity() * sizeof(Wanted);
  return blocks;
}

void PlacesReader::trim() {
  lanes_.clear();
  wanted = {};
  ram_bytes_ = 0;
}

size_t PlacesReader::lane_bytes() const { return std::max(kLaneBytes, size_t{geometry_.block_bytes}); }

PlacesReader::Lane& PlacesReader::lane(size_t number) {
  if (number < lanes_.size()) return lanes_[number];
  const size_t most = static_cast<size_t>(std::max(1, depth_ / static_cast<int>(kLanes)));
  Lane lane{open_reader(static_cast<int>(most)), allocate_aligned(lane_bytes()), {}, {}};
  lane.requests.reserve(most);
  lane.pieces.reserve(lane_bytes() / geometry_.block_bytes);
  lanes_.reserve(kLanes);
  lanes_.push_back(std::move(lane));
  return lanes_.back();
}

// Takes from the cursor what one lane holds, and begins to read it.
void PlacesReader::start(Lane& lane, const std::vector<Wanted>& wanted, const std::vector<WantedRun>& runs,
                         Cursor& cursor) {
  lane.requests.clear();
  lane.pieces.clear();
  const size_t most_pieces = lane_bytes() / geometry_.block_bytes;
  const auto block_at = [&](size_t at) { return record_of(wanted_place(wanted[at])) / geometry_.records_per_block; };
  while (cursor.run < runs.size() && lane.pieces.size() < most_pieces) {
    const WantedRun& run = runs[cursor.run];
    const uint32_t block = block_at(cursor.at);
    const bool joins = !lane.pieces.empty() && lane.pieces.back().run == &run &&
                       lane.pieces.back().block + 1 == block &&
                       lane.requests.back().bytes + geometry_.block_bytes <= kMostJoined;
    if (!joins && lane.requests.size() == lane.requests.capacity()) break;
    char* const into = lane.memory.get() + lane.pieces.size() * geometry_.block_bytes;
    if (joins) {
      lane.requests.back().bytes += geometry_.block_bytes;
    } else {
      lane.requests.push_back({run.file.get(), geometry_.block_offset(block), into, geometry_.block_bytes});
    }
    const size_t begin = cursor.at;
    while (cursor.at < run.end && block_at(cursor.at) == block) ++cursor.at;
    lane.pieces.push_back({&run, block, into, begin, cursor.at});
    if (cursor.at == run.end && ++cursor.run < runs.size()) cursor.at = runs[cursor.run].begin;
  }
  lane.reader->submit(lane.requests.data(), lane.requests.size());
}

void PlacesReader::finish(Lane& lane, const std::vector<Wanted>& wanted, char* records) {
  lane.reader->wait();
  for (const ReadRequest& request : lane.requests) check_request(request);
  for (const Piece& piece : lane.pieces) {
    const uint32_t last = record_of(wanted_place(wanted[piece.end - 1]));
    check_block(geometry_, piece.run->seed, piece.block, last % geometry_.records_per_block + 1, piece.bytes,
                piece.run->file->path());
    for (size_t i = piece.begin; i < piece.end; ++i)
      std::memcpy(records + wanted_index(wanted[i]) * geometry_.record_bytes,
                  piece.bytes + geometry_.record_offset(record_of(wanted_place(wanted[i]))), geometry_.record_bytes);
  }
}

std::shared_ptr<PlacesReaders> PlacesReaders::shared(const Geometry& geometry, int depth) {
  static std::mutex mutex;
  static std::map<std::tuple<uint32_t, int, bool>, std::weak_ptr<PlacesReaders>> pools;
  std::lock_guard lock(mutex);
  auto& pool = pools[{geometry.record_bytes, depth, files().plain()}];
  if (auto alive = pool.lock()) return alive;
  auto fresh = std::make_shared<PlacesReaders>(geometry, depth);
  pool = fresh;
  return fresh;
}

PlacesReaders::Lent PlacesReaders::lend() {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return !idle_.empty() || all_.size() < kMostReaders; });
  if (idle_.empty()) {
    idle_.reserve(kMostReaders);
    all_.push_back(std::make_unique<PlacesReader>(geometry_, depth_));
    return Lent(all_.back().get(), {this});
  }
  PlacesReader* const reader = idle_.back();
  idle_.pop_back();
  return Lent(reader, {this});
}

void PlacesReaders::give_back(PlacesReader* reader) {
  {
    std::lock_guard lock(mutex_);
    idle_.push_back(reader);
  }
  given_back_.notify_one();
}

size_t PlacesReaders::trim() {
  std::lock_guard lock(mutex_);
  size_t freed = 0;
  for (PlacesReader* reader : idle_) {
    freed += reader->ram_bytes();
    reader->trim();
  }
  return freed;
}

size_t PlacesReaders::ram_bytes() const {
  std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& reader : all_) sum += reader->ram_bytes();
  return sum;
}

}  // namespace hotrow
