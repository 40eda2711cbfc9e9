#include "remote/redis_replies.h"

#include <cstring>
#include <stdexcept>

#include "hash/hash.h"

namespace hotrow {
namespace {

constexpr size_t kLongestLine = 4096;

[[noreturn]] void not_redis(const char* at, const char* end) {
  throw std::runtime_error("not a reply of a Redis server: " + std::string(at, std::min<size_t>(end - at, 40)));
}

// Parses a number and the "\r\n" after it. Null: the line is incomplete.
const char* take_number(const char* at, const char* end, int64_t& number) {
  const char* start = at;
  const bool negative = at < end && *at == '-';
  at += negative;
  number = 0;
  for (; at < end && *at >= '0' && *at <= '9'; ++at) {
    if (__builtin_mul_overflow(number, int64_t{10}, &number) || __builtin_add_overflow(number, *at - '0', &number))
      not_redis(start, end);
  }
  if (end - at < 2) return nullptr;
  if (at == start + negative || at[0] != '\r' || at[1] != '\n') not_redis(start, end);
  if (negative) number = -number;
  return at + 2;
}

}  // namespace

void group_by_partition(const int64_t* keys, size_t count, int bits, uint32_t* order, uint32_t* bounds) {
  const size_t partitions = size_t{1} << bits;
  const auto partition_of = [&](int64_t key) { return bits ? hash_key(key) >> (64 - bits) : 0; };
  std::memset(bounds, 0, (partitions + 1) * sizeof(uint32_t));
  for (size_t i = 0; i < count; ++i) ++bounds[partition_of(keys[i]) + 1];
  for (size_t p = 0; p < partitions; ++p) bounds[p + 1] += bounds[p];
  std::vector<uint32_t> next(bounds, bounds + partitions);
  for (size_t i = 0; i < count; ++i) order[next[partition_of(keys[i])]++] = static_cast<uint32_t>(i);
}

void encode_fields(const int64_t* keys, const uint32_t* order, size_t count, char* out) {
  for (size_t i = 0; i < count; ++i, out += kFieldBytes) {
    std::memcpy(out, "$8\r\n", 4);
    std::memcpy(out + 4, &keys[order[i]], 8);
    std::memcpy(out + 12, "\r\n", 2);
  }
}

size_t RedisRowReplies::feed(char* buffer, size_t size) {
  const char *at = buffer, *end = buffer + size;
  while (next_ < commands_.size()) {
    const char* after = inside_ ? take_row(at, end) : take_line(at, end);
    if (!after) break;
    at = after;
    if (inside_ && stamped_ && row_ == commands_[next_].count) finish();
  }
  const size_t left = end - at;
  if (left && next_ == commands_.size()) not_redis(at, end);
  if (at != buffer) std::memmove(buffer, at, left);
  return left;
}

// The beginning of a reply: an array's length, an error, or a line without content.
const char* RedisRowReplies::take_line(const char* at, const char* end) {
  if (at == end) return nullptr;
  const Command& command = commands_[next_];
  if (*at == '*' && command.places) {
    int64_t rows;
    const char* after = take_number(at + 1, end, rows);
    if (after && rows != static_cast<int64_t>(command.count) + 1) not_redis(at, end);
    inside_ = after != nullptr;
    return after;
  }
  const auto* stop = static_cast<const char*>(std::memchr(at, '\n', end - at));
  if (!stop) {
    if (static_cast<size_t>(end - at) > kLongestLine) not_redis(at, end);
    return nullptr;
  }
  if (*at == '-')
    errors_.push_back({next_, std::string(at + 1, stop - 1)});
  else if (command.places || (*at != '+' && *at != ':'))
    not_redis(at, end);
  ++next_;
  return stop + 1;
}

const char* RedisRowReplies::take_row(const char* at, const char* end) {
  if (at == end) return nullptr;
  if (*at != '$') not_redis(at, end);
  int64_t bytes;
  const char* value = take_number(at + 1, end, bytes);
  if (!value) return nullptr;
  if (bytes < 0) {
    if (stamped_)
      ++row_;
    else
      stamped_ = lost_ = true;
    return value;
  }
  if (end - value < bytes + 2) return nullptr;
  if (value[bytes] != '\r' || value[bytes + 1] != '\n') not_redis(at, end);
  if (!stamped_) {
    stamped_ = true;
    return value + bytes + 2;
  }
  const uint32_t place = commands_[next_].places[row_];
  if (static_cast<size_t>(bytes) == kVersionBytes + row_bytes_) {
    std::memcpy(versions_ + place, value, kVersionBytes);
    std::memcpy(rows_ + place * row_bytes_, value + kVersionBytes, row_bytes_);
    found_[place] = 1;
  } else {
    ++odd_;
    odd_bytes_ = bytes;
  }
  ++row_;
  return value + bytes + 2;
}

void RedisRowReplies::finish() {
  if (lost_) errors_.push_back({next_, "LOST"});
  if (odd_)
    errors_.push_back({next_, "SIZE " + std::to_string(odd_) + " rows of another size, one of " +
                                  std::to_string(odd_bytes_) + " bytes instead of " +
                                  std::to_string(kVersionBytes + row_bytes_)});
  odd_ = 0;
  row_ = 0;
  inside_ = stamped_ = lost_ = false;
  ++next_;
}

}  // namespace hotrow
