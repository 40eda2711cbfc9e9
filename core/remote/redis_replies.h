// Encodes requests for rows to a Redis server and decodes the replies, a batch at a time.
//
// A batch's keys are grouped by partition (the top bits of hash_key, so a partition is a range of shards or a part of
// one). Each partition is one Redis hash; one HMGET reads all its fields. Keys have a fixed size, so the fields of a
// command are copied from a pattern. Replies come in the order of the commands. RedisRowReplies copies their rows to
// the caller's arrays as the bytes arrive, without an object per row (redis-py makes two: benchmarks
// `online/redis_read` compares).
//
// Sockets, TLS and clusters are handled by src/hotrow/tiers/remote/redis_connection.py.
// Threads: a RedisRowReplies has one user at a time; the functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hotrow {

inline constexpr int kMostPartitionBits = 14;  // a Redis cluster has 2^14 slots
inline constexpr size_t kFieldBytes = 14;      // "$8\r\n" key "\r\n"
inline constexpr size_t kVersionBytes = 8;     // before a row's values, little-endian

// Indexes of the keys by partition, ascending within one; partition p is at bounds[p] to bounds[p + 1]. bounds has
// 2^bits + 1 elements.
void group_by_partition(const int64_t* keys, size_t count, int bits, uint32_t* order, uint32_t* bounds);

// The fields of an HMGET: kFieldBytes for each of keys[order[i]].
void encode_fields(const int64_t* keys, const uint32_t* order, size_t count, char* out);

class RedisRowReplies {
 public:
  // Each reply is a version and row_bytes of values. Row i of `places` goes to rows + place * row_bytes,
  // versions[place] and found[place]; missing rows are left unchanged.
  RedisRowReplies(size_t row_bytes, char* rows, int64_t* versions, uint8_t* found)
      : row_bytes_(row_bytes), rows_(rows), versions_(versions), found_(found) {}

  // Expects the reply to a command for the partition's marker and the rows of these places, which must stay valid until
  // the reply is done. A missing marker means that the partition was lost (its server came back empty): an error,
  // "LOST".
  void expect(const uint32_t* places, size_t count) { commands_.push_back({places, count}); }
  // Expects a one-line reply without content ("+OK", ":1"), such as that of ASKING.
  void expect_line() { commands_.push_back({nullptr, 0}); }

  // Parses as much as possible, moves the rest to the front of the buffer and returns its size. Throws
  // std::runtime_error for bytes that no Redis server sends.
  size_t feed(char* buffer, size_t size);
  size_t done() const { return next_; }  // commands with a complete reply, errors included
  size_t expected() const { return commands_.size(); }
  // Commands with an error reply, or with rows of a wrong size.
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
  size_t next_ = 0;       // the command whose reply is being parsed
  size_t row_ = 0;        // its next row
  bool inside_ = false;   // the reply's array has begun
  bool stamped_ = false;  // the partition's marker was parsed
  bool lost_ = false;
  size_t odd_ = 0;  // rows of a wrong size in this command
  int64_t odd_bytes_ = 0;
};

}  // namespace hotrow
