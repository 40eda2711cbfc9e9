// A record of a segment: a row with its key and metadata, and where it is.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace hotrow {

// A corrupt file. The message names the file (and block) and the cure.
class CorruptFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct RecordHead {
  int64_t key;
  uint32_t stamp;  // last step + 1
  uint16_t count;  // as in the header
  uint16_t flags;  // 0
};
static_assert(sizeof(RecordHead) == 16);

using RecordAddress = uint64_t;  // segment << kRecordBits | record, below 2^40
inline constexpr int kRecordBits = 20;
inline constexpr RecordAddress kNoAddress = ~RecordAddress{0};
inline constexpr RecordAddress kMaxAddresses = RecordAddress{1} << 40;

}  // namespace hotrow
