#include "remote/redis_replies.h"

#include <cstring>
#include <stdexcept>

#include "hash/hash.h"
#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr size_t kBytes = 12;

std::string bulk(int64_t version, const std::string& row) {
  std::string text(1, '$');
  text += std::to_string(8 + row.size());
  text += "\r\n";
  text.append(reinterpret_cast<const char*>(&version), 8);
  text += row;
  text += "\r\n";
  return text;
}

struct Sink {
  explicit Sink(size_t count) : rows(count * kBytes, '.'), versions(count, -1), found(count, 0) {}
  RedisRowReplies replies() { return RedisRowReplies(kBytes, rows.data(), versions.data(), found.data()); }
  std::string row(size_t i) const { return rows.substr(i * kBytes, kBytes); }
  std::string rows;
  std::vector<int64_t> versions;
  std::vector<uint8_t> found;
};

// The bytes arrive in pieces of a size.
void feed_in_pieces(RedisRowReplies& replies, const std::string& bytes, size_t piece) {
  std::vector<char> buffer(4096);
  size_t left = 0;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    const size_t size = std::min(piece, bytes.size() - at);
    std::memcpy(buffer.data() + left, bytes.data() + at, size);
    left = replies.feed(buffer.data(), left + size);
  }
  CHECK_EQ(left, 0u);
}

TEST(rows_go_to_their_places_however_the_bytes_arrive) {
  const std::string bytes = "*3\r\n$1\r\n1\r\n" + bulk(7, "twelve bytes") + "$-1\r\n" + "+OK\r\n" +
                            "-MOVED 5 127.0.0.1:7001\r\n" + "*2\r\n$2\r\n\r\n\r\n" + bulk(9, "\r\n$-1\r\n*2\r\n1");
  const uint32_t first[] = {3, 0}, moved[] = {2}, last[] = {1};
  for (size_t piece = 1; piece <= bytes.size(); ++piece) {
    Sink sink(4);
    RedisRowReplies replies = sink.replies();
    replies.expect(first, 2);
    replies.expect_line();
    replies.expect(moved, 1);
    replies.expect(last, 1);
    feed_in_pieces(replies, bytes, piece);
    CHECK_EQ(replies.done(), 4u);
    CHECK_EQ(sink.row(3), "twelve bytes");
    CHECK_EQ(sink.row(1), "\r\n$-1\r\n*2\r\n1");
    CHECK_EQ(sink.versions[3], 7);
    CHECK_EQ(sink.versions[1], 9);
    CHECK_EQ(int(sink.found[0]) + sink.found[2], 0);
    CHECK_EQ(sink.row(0), "............");
    CHECK_EQ(replies.errors().size(), 1u);
    CHECK_EQ(replies.errors()[0].command, 2u);
    CHECK_EQ(replies.errors()[0].text, "MOVED 5 127.0.0.1:7001");
  }
}

TEST(a_row_of_another_size_is_an_error_and_the_rest_is_read) {
  const uint32_t places[] = {0, 1};
  Sink sink(2);
  RedisRowReplies replies = sink.replies();
  replies.expect(places, 2);
  feed_in_pieces(replies, "*3\r\n$1\r\n1\r\n$3\r\nabc\r\n" + bulk(1, "twelve bytes"), 1000);
  CHECK_EQ(replies.errors().size(), 1u);
  CHECK_EQ(replies.errors()[0].text.substr(0, 6), "SIZE 1");
  CHECK_EQ(int(sink.found[0]), 0);
  CHECK_EQ(int(sink.found[1]), 1);
}

TEST(a_partition_without_its_stamp_is_lost) {
  const uint32_t places[] = {0}, others[] = {1};
  Sink sink(2);
  RedisRowReplies replies = sink.replies();
  replies.expect(places, 1);
  replies.expect(others, 1);
  feed_in_pieces(replies, "*2\r\n$-1\r\n$-1\r\n*2\r\n$1\r\n1\r\n" + bulk(1, "twelve bytes"), 3);
  CHECK_EQ(replies.errors().size(), 1u);
  CHECK_EQ(replies.errors()[0].text, "LOST");
  CHECK_EQ(replies.errors()[0].command, 0u);
  CHECK_EQ(int(sink.found[1]), 1);
}

TEST(bytes_that_no_redis_server_sends_are_rejected) {
  const uint32_t places[] = {0, 1};
  for (const char* bytes : {"HTTP/1.1 400 Bad Request\r\n", "*2\r\n", "*3\r\n:1\r\n", "*3\r\n$3\r\nabcd\r\n", "$x\r\n",
                            "*3\r\n$99999999999999999999\r\n", "*3\r\n$-1\r\n$-1\r\n$-1\r\n+more\r\n", "+OK\r\n"}) {
    Sink sink(2);
    RedisRowReplies replies = sink.replies();
    replies.expect(places, 2);
    std::string copy(bytes);
    CHECK_THROWS(std::runtime_error, replies.feed(copy.data(), copy.size()));
  }
}

TEST(keys_are_grouped_by_the_top_bits_of_their_hash) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 1000; ++i) keys.push_back(i * 7919 - 500);
  for (int bits : {0, 1, 6, 10, 14}) {
    std::vector<uint32_t> order(keys.size()), bounds((size_t{1} << bits) + 1);
    group_by_partition(keys.data(), keys.size(), bits, order.data(), bounds.data());
    CHECK_EQ(bounds.back(), keys.size());
    size_t wrong = 0;
    for (size_t p = 0; p + 1 < bounds.size(); ++p)
      for (uint32_t i = bounds[p]; i < bounds[p + 1]; ++i) {
        wrong += bits && hash_key(keys[order[i]]) >> (64 - bits) != p;
        wrong += i > bounds[p] && order[i] <= order[i - 1];
      }
    CHECK_EQ(wrong, 0u);
  }
}

TEST(a_field_is_its_key_between_a_length_and_an_end) {
  const int64_t keys[] = {5, -1};
  const uint32_t order[] = {1, 0};
  char out[2 * kFieldBytes];
  encode_fields(keys, order, 2, out);
  CHECK_EQ(std::string(out, kFieldBytes), std::string("$8\r\n\xff\xff\xff\xff\xff\xff\xff\xff\r\n"));
  CHECK_EQ(std::string(out + kFieldBytes, kFieldBytes), std::string("$8\r\n\5\0\0\0\0\0\0\0\r\n", kFieldBytes));
}

}  // namespace
}  // namespace hotrow
