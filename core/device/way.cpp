#include "device/way.h"

#include <algorithm>
#include <stdexcept>

namespace hotrow::device {

void Leaving::put(const std::vector<TablePart>& parts, const uint32_t* slots, const uint32_t* steps,
                  const uint32_t* counts, uint32_t clean) {
  check(driver().context_set(context_), "to be used on this thread");
  for (const Piece& piece : pieces_) {
    piece.arrived->wait();
    lower_rows(parts, slots, steps, counts, clean, piece.begin, piece.end, staged_ + piece.begin * width_, width_);
  }
}

Way::Way(Handle up, Handle copies, Handle down, size_t width, size_t room, size_t piece,
         const std::vector<std::pair<Handle, PullCell*>>& pulls)
    : up_(up), copies_(copies), down_(down), width_(width), room_(room), piece_(piece) {
  if (!width || !room || !piece || pulls.empty()) throw std::invalid_argument("Way: nothing to work with");
  check(driver().context_get(&context_), "to say which device this is");
  for (const auto& [captured, cell] : pulls) pulls_.emplace_back(captured, cell);
}

size_t Way::raise(const Rising& rising, size_t parts) {
  check(driver().context_set(context_), "to be used on this thread");
  size_t absent = pull(rising, parts);
  if (absent == 0 || !rising.all) absent += gather(rising);
  copied_.record(copies_);
  copied_.hold(up_);
  return absent;
}

size_t Way::pull(const Rising& rising, size_t parts) {
  const size_t part = std::min(room_, rising.first / std::max<size_t>(1, parts) + 1);
  size_t absent = 0;
  for (size_t begin = 0; begin < rising.first; begin += part) {
    const size_t end = std::min(rising.first, begin + part);
    absent += seek_rows(rising.parts, rising.keys, begin, end, rising.slots, rising.steps, rising.counts);
    if (absent && rising.all) break;
    Pull& pull = pulls_[next_++ % pulls_.size()];
    pull.read.wait();  // for what this cell was last used for
    const int64_t words = static_cast<int64_t>(begin * sizeof(int32_t));
    *pull.cell = {rising.device_slots + words, rising.device_tables + words,
                  reinterpret_cast<int64_t>(rising.slots + begin), static_cast<int64_t>(end - begin)};
    pull.graph.launch(up_);
    pull.read.record(up_);
  }
  return absent;
}

size_t Way::gather(const Rising& rising) {
  size_t absent = 0;
  for (size_t begin = rising.first; begin < rising.count; begin += piece_) {
    const size_t end = std::min(rising.count, begin + piece_), row = begin - rising.first;
    float* staged = rising.staged + row * width_;
    if (rising.keys)
      absent += seek_rows(rising.parts, rising.keys, begin, end, rising.slots, rising.steps, rising.counts, staged,
                          width_);
    else
      copy_rows(rising.parts, rising.slots, begin, end, staged, width_);
    if (absent && rising.all) break;
    const size_t bytes = width_ * sizeof(float);
    check(driver().copy_up(rising.incoming + row * bytes, staged, (end - begin) * bytes, copies_), "a copy to it");
  }
  return absent;
}

std::unique_ptr<Leaving> Way::lower(Handle stream, DeviceAddress leaving, size_t rows, float* staged) {
  check(driver().context_set(context_), "to be used on this thread");
  auto sent = std::make_unique<Leaving>(context_, staged, width_);
  Event collected;
  collected.record(stream);
  collected.hold(down_);
  for (size_t begin = 0; begin < rows; begin += piece_) {
    const size_t end = std::min(rows, begin + piece_), bytes = width_ * sizeof(float);
    check(driver().copy_down(staged + begin * width_, leaving + begin * bytes, (end - begin) * bytes, down_),
          "a copy from it");
    sent->pieces_.push_back({begin, end, std::make_unique<Event>()});
    sent->pieces_.back().arrived->record(down_);
  }
  return sent;
}

}  // namespace hotrow::device
