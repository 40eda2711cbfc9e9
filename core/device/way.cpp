#include "device/way.h"

#include <algorithm>
#include <stdexcept>

namespace hotrow::device {

void Leaving::put(const std::vector<TablePart>& parts, const uint32_t* slots, const uint32_t* steps,
                  const uint32_t* counts, uint32_t clean) {
  check(driver().context_set(context_), "to be used on this thread");
  for (size_t p = 0; p < pieces_.size();) {
    const size_t begin = pieces_[p].begin;
    pieces_[p].arrived->wait();
    do {  // waking the pool takes a while: as many as are there
      ++p;
    } while (p < pieces_.size() && pieces_[p].arrived->past());
    lower_rows(parts, slots, steps, counts, clean, begin, pieces_[p - 1].end, staged_ + begin * width_, width_);
  }
}

Leaving::~Leaving() {
  try {
    check(driver().context_set(context_), "to be used on this thread");
    if (!pieces_.empty()) pieces_.back().arrived->wait();  // past already, if they were put away
  } catch (const std::runtime_error&) {                    // the device failed, which others hear
  }
}

Way::Way(Handle up, Handle copies, Handle down, size_t width, size_t room, size_t piece,
         const std::vector<std::pair<Handle, PullCell*>>& pulls, const std::vector<std::pair<Handle, LandCell*>>& lands)
    : up_(up), copies_(copies), down_(down), width_(width), room_(room), piece_(piece) {
  if (!width || !room || !piece || pulls.empty() || lands.empty())
    throw std::invalid_argument("Way: nothing to work with");
  check(driver().context_get(&context_), "to say which device this is");
  for (const auto& [captured, cell] : pulls) pulls_.emplace_back(captured, cell);
  for (const auto& [captured, cell] : lands) lands_.emplace_back(captured, cell);
}

size_t Way::raise(const Rising& rising, size_t parts) {
  check(driver().context_set(context_), "to be used on this thread");
  const Sought sought{rising.parts, rising.keys, rising.slots, rising.steps, rising.counts, rising.all};
  const size_t part = std::min(room_, rising.first / std::max<size_t>(1, parts) + 1);
  size_t absent = 0, at = 0;
  std::vector<Segment> segments;
  // After an error, too: who is told that `up` has passed gives the memory that copies read to others.
  struct Copies {
    Way& way;
    bool held = false;
    void hold() {
      held = true;
      way.copied_.record(way.copies_);
      way.copied_.hold(way.up_);
    }
    ~Copies() {
      if (held) return;
      try {
        hold();
      } catch (const std::runtime_error&) {  // the first error says more
      }
    }
  } copies{*this};
  while (at < rising.count && !(absent && rising.all)) {
    segments.clear();
    const size_t first_cell = next_;
    for (; at < rising.first && segments.size() < pulls_.size(); at = segments.back().end) {
      segments.push_back({at, std::min(rising.first, at + part)});
      pulls_[next_++ % pulls_.size()].read.wait();  // what its cell said has been read
    }
    const size_t pulled = segments.size();
    for (; at >= rising.first && at < rising.count; at = segments.back().end)
      segments.push_back({at, std::min(rising.count, at + piece_), rising.staged + (at - rising.first) * width_});
    absent += seek_segments(sought, segments, width_, [&](size_t s) {
      check(driver().context_set(context_), "to be used on this thread");
      const auto& [begin, end, staged] = segments[s];
      if (s < pulled)
        pull(rising, begin, end, pulls_[(first_cell + s) % pulls_.size()]);
      else
        copy(rising, begin, end);
    });
  }
  copies.hold();
  if (rising.land && !(absent && rising.all)) {
    Launch<LandCell>& land = lands_[next_land_++ % lands_.size()];
    land.read.wait();
    land.run(up_, {rising.device_slots, reinterpret_cast<int64_t>(rising.slots), static_cast<int64_t>(rising.count),
                   static_cast<int64_t>(rising.first), static_cast<int64_t>(rising.incoming)});
  }
  return absent;
}

void Way::pull(const Rising& rising, size_t begin, size_t end, Launch<PullCell>& pull) {
  const int64_t words = static_cast<int64_t>(begin * sizeof(int32_t));
  pull.run(up_, {rising.device_slots + words, rising.device_tables + words,
                 reinterpret_cast<int64_t>(rising.slots + begin), static_cast<int64_t>(end - begin)});
}

void Way::copy(const Rising& rising, size_t begin, size_t end) {
  const size_t row = begin - rising.first, bytes = width_ * sizeof(float);
  const float* staged = rising.staged + row * width_;
  check(driver().copy_up(rising.incoming + row * bytes, staged, (end - begin) * bytes, copies_), "a copy to it");
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
