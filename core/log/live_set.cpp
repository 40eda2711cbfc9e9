// The records of a snapshot: one live bit per record, by segment.
#include <algorithm>

#include "log/log.h"

namespace hotrow {

void LiveSet::set(RecordAddress place) {
  const uint32_t record = static_cast<uint32_t>(place & ((RecordAddress{1} << kRecordBits) - 1));
  Part& part = segments[place >> kRecordBits];
  part.records = std::max(part.records, record + 1);
  part.bits.resize((part.records + 63) / 64);
  uint64_t& word = part.bits[record / 64];
  const uint64_t bit = uint64_t{1} << (record % 64);
  part.live += (word & bit) == 0;
  word |= bit;
}

uint64_t LiveSet::live() const {
  uint64_t sum = 0;
  for (const auto& [segment, part] : segments) sum += part.live;
  return sum;
}

}  // namespace hotrow
