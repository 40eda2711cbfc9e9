#include "segment/record_reader.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

namespace hotrow {
namespace {

constexpr size_t kBuffers = 4;
constexpr size_t kBufferBytes = size_t{256} << 10;
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

uint64_t RecordReader::read(const std::vector<RecordRequest>& wanted, const std::vector<SegmentRequests>& runs,
                            char* records) {
  Cursor cursor{0, runs.empty() ? 0 : runs[0].begin};
  uint64_t blocks = 0;
  try {
    size_t started = 0, finished = 0;
    while (true) {
      for (; started < finished + kBuffers && cursor.run < runs.size(); ++started) {
        ReadBuffer& next = buffer(started % kBuffers);
        start(next, wanted, runs, cursor);
        blocks += next.pieces.size();
      }
      if (finished == started) break;
      finish(buffers_[finished++ % kBuffers], wanted, records);
    }
  } catch (...) {
    for (ReadBuffer& each : buffers_) each.reader->wait();  // the reads write to the buffers' memory
    throw;
  }
  ram_bytes_ = buffers_.size() * buffer_bytes() + this->wanted.capacity() * sizeof(RecordRequest);
  return blocks;
}

void RecordReader::trim() {
  buffers_.clear();
  wanted = {};
  ram_bytes_ = 0;
}

size_t RecordReader::buffer_bytes() const { return std::max(kBufferBytes, size_t{geometry_.block_bytes}); }

RecordReader::ReadBuffer& RecordReader::buffer(size_t number) {
  if (number < buffers_.size()) return buffers_[number];
  const size_t most = static_cast<size_t>(std::max(1, depth_ / static_cast<int>(kBuffers)));
  ReadBuffer buffer{open_reader(static_cast<int>(most)), allocate_aligned(buffer_bytes()), {}, {}};
  buffer.requests.reserve(most);
  buffer.pieces.reserve(buffer_bytes() / geometry_.block_bytes);
  buffers_.reserve(kBuffers);
  buffers_.push_back(std::move(buffer));
  return buffers_.back();
}

// Takes as many requests from the cursor as fit into one buffer, and starts their reads.
void RecordReader::start(ReadBuffer& buffer, const std::vector<RecordRequest>& wanted,
                         const std::vector<SegmentRequests>& runs, Cursor& cursor) {
  buffer.requests.clear();
  buffer.pieces.clear();
  const size_t most_pieces = buffer_bytes() / geometry_.block_bytes;
  const auto block_at = [&](size_t at) { return record_of(request_address(wanted[at])) / geometry_.records_per_block; };
  while (cursor.run < runs.size() && buffer.pieces.size() < most_pieces) {
    const SegmentRequests& run = runs[cursor.run];
    const uint32_t block = block_at(cursor.at);
    const bool joins = !buffer.pieces.empty() && buffer.pieces.back().run == &run &&
                       buffer.pieces.back().block + 1 == block &&
                       buffer.requests.back().bytes + geometry_.block_bytes <= kMostJoined;
    if (!joins && buffer.requests.size() == buffer.requests.capacity()) break;
    char* const into = buffer.memory.get() + buffer.pieces.size() * geometry_.block_bytes;
    if (joins) {
      buffer.requests.back().bytes += geometry_.block_bytes;
    } else {
      buffer.requests.push_back({run.file.get(), geometry_.block_offset(block), into, geometry_.block_bytes});
    }
    const size_t begin = cursor.at;
    while (cursor.at < run.end && block_at(cursor.at) == block) ++cursor.at;
    buffer.pieces.push_back({&run, block, into, begin, cursor.at});
    if (cursor.at == run.end && ++cursor.run < runs.size()) cursor.at = runs[cursor.run].begin;
  }
  buffer.reader->submit(buffer.requests.data(), buffer.requests.size());
}

void RecordReader::finish(ReadBuffer& buffer, const std::vector<RecordRequest>& wanted, char* records) {
  buffer.reader->wait();
  for (const ReadRequest& request : buffer.requests) check_request(request);
  for (const Piece& piece : buffer.pieces) {
    const uint32_t last = record_of(request_address(wanted[piece.end - 1]));
    check_block(geometry_, piece.run->seed, piece.block, last % geometry_.records_per_block + 1, piece.bytes,
                piece.run->file->path());
    for (size_t i = piece.begin; i < piece.end; ++i)
      std::memcpy(records + request_index(wanted[i]) * geometry_.record_bytes,
                  piece.bytes + geometry_.record_offset(record_of(request_address(wanted[i]))), geometry_.record_bytes);
  }
}

std::shared_ptr<RecordReaderPool> RecordReaderPool::shared(const Geometry& geometry, int depth) {
  static std::mutex mutex;
  static std::map<std::tuple<uint32_t, int, bool>, std::weak_ptr<RecordReaderPool>> pools;
  std::lock_guard lock(mutex);
  auto& pool = pools[{geometry.record_bytes, depth, files().supports_descriptor_reads()}];
  if (auto alive = pool.lock()) return alive;
  auto fresh = std::make_shared<RecordReaderPool>(geometry, depth);
  pool = fresh;
  return fresh;
}

RecordReaderPool::Lease RecordReaderPool::acquire() {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return !idle_.empty() || all_.size() < kMostReaders; });
  if (idle_.empty()) {
    idle_.reserve(kMostReaders);
    all_.push_back(std::make_unique<RecordReader>(geometry_, depth_));
    return Lease(all_.back().get(), {this});
  }
  RecordReader* const reader = idle_.back();
  idle_.pop_back();
  return Lease(reader, {this});
}

void RecordReaderPool::give_back(RecordReader* reader) {
  {
    std::lock_guard lock(mutex_);
    idle_.push_back(reader);
  }
  given_back_.notify_one();
}

size_t RecordReaderPool::trim() {
  std::lock_guard lock(mutex_);
  size_t freed = 0;
  for (RecordReader* reader : idle_) {
    freed += reader->ram_bytes();
    reader->trim();
  }
  return freed;
}

size_t RecordReaderPool::ram_bytes() const {
  std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& reader : all_) sum += reader->ram_bytes();
  return sum;
}

}  // namespace hotrow
