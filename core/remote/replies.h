// What travels between a server and a Redis node for a batch of rows: fields out, rows in.
//
// A batch's keys are grouped by partition (the top bits of hash_key, so a partition is a range of shards or a part of
// one), and each partition is one hash in Redis that is asked for all its fields with one HMGET. Keys have a fixed
// size, so the fields of a command are copied from a pattern. Replies come in the order of the commands; RowReplies
// puts their rows where the caller wants them as the bytes arrive, without an object per row (redis-py makes two:
// benchmarks `online/redis_read` compares).
//
// Nothing here knows sockets, TLS or clusters: src/hotrow/tiers/remote_wire.py does.
// Threads: a RowReplies has one user at a time; the functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hotrow {

inline constexpr int kMostPartitionBits = 14;  // a Redis cluster has 2^14 slots
inline constexpr size_t kFieldBytes = 14;      // "$8\r\n" key "\r\n"
inline constexpr size_t kVersionBytes = 8;     // before a row's values, little-endian

// Places of the keys by partition, in rising order within one; partition p has bounds[p] to bounds[p + 1]. bounds has
// 2^bits + 1 elements.
void group_by_partition(const int64_t* keys, size_t count, int bits, uint32_t* order, uint32_t* bounds);

// The fields of an HMGET: kFieldBytes for each of keys[order[i]].
void encode_fields(const int64_t* keys, const uint32_t* order, size_t count, char* out);

class RowReplies {
 public:
  // Rows have `row_bytes` behind their version. They go to rows + place * row_bytes, versions[place] and found[place];
  // what is not found is left as it is.
  RowReplies(size_t row_bytes, char* rows, int64_t* versions, uint8_t* found)
      : row_bytes_(row_bytes), rows_(rows), versions_(versions), found_(found) {}

  // The next command asks for a stamp and the rows of these places, which must stay until its reply is done. Without a
  // stamp the partition is not what was once written (its server came back empty): an error, "LOST".
  void expect(const uint32_t* places, size_t count) { commands_.push_back({places, count}); }
  // A reply of one line ("+OK", ":1") that says nothing, as that of ASKING.
  void expect_line() { commands_.push_back({nullptr, 0}); }

  // Takes what it can of the bytes; the rest is moved to the front of the buffer, and its size returned. Throws
  // std::runtime_error when they are not what a Redis server would say.
  size_t feed(char* buffer, size_t size);
  size_t done() const { return next_; }  // commands with a whole reply, errors among them
  size_t expected() const { return commands_.size(); }
  // Commands that were answered by an error, and rows of another size than wanted.
  struct Error {
    size_t command;
    std::string text;
  };
  const std::vector<Error>& errors() const { return errors_; }

 private:
  struct Command {
    const uint32_t* places;
    size_t count;
  };
  const char* take_line(const char* at, const char* end);
  const char* take_row(const char* at, const char* end);
  void finish();

  const size_t row_bytes_;
  char* rows_;
  int64_t* versions_;
  uint8_t* found_;
  std::vector<Command> commands_;
  std::vector<Error> errors_;
  size_t next_ = 0;       // the command whose reply comes
  size_t row_ = 0;        // its next row
  bool inside_ = false;   // its array has begun
  bool stamped_ = false;  // and its first element was seen
  bool lost_ = false;
  size_t odd_ = 0;  // rows of another size, in this command
  int64_t odd_bytes_ = 0;
};

}  // namespace hotrow
