// Lookup frames: what is parsed is what was written, every malformed payload is refused, and the bytes on the wire are
// those of docs/formats/rows-protocol.md.
#include "rowserver/row_protocol.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "kernels/row_kernels.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Keys;
using testing::lookup_payload;
using testing::Random;
using testing::TableKeyLists;

const std::vector<int> kDims{8, 5, 1, 64, 128};
constexpr RowType kWires[] = {RowType::kFloat, RowType::kHalf, RowType::kByte};

// Parses a copy in memory of exactly its size, so that the address sanitizer sees a read past its end.
struct Parsed {
  explicit Parsed(const std::vector<char>& payload, const std::vector<int>& dims = kDims)
      : copy(new int64_t[(payload.size() + 7) / 8]), exact(new char[payload.size()]) {
    if (!payload.empty()) std::memcpy(copy.get(), payload.data(), payload.size());
    if (!payload.empty()) std::memcpy(exact.get(), payload.data(), payload.size());
    // The head first from the exact copy: it needs no alignment there, and keys are not read.
    parse_lookup(exact.get(), payload.size(), dims, lookup);
    parse_lookup(reinterpret_cast<const char*>(copy.get()), payload.size(), dims, lookup);
  }
  std::unique_ptr<int64_t[]> copy;
  std::unique_ptr<char[]> exact;
  ParsedLookup lookup;
};

void put(std::vector<char>& payload, size_t at, uint32_t value, size_t bytes = 4) {
  std::memcpy(payload.data() + at, &value, bytes);
}

TableKeyLists random_lists(Random& random) {
  TableKeyLists lists;
  for (size_t i = random.below(6); i > 0; --i)
    lists.emplace_back(static_cast<uint32_t>(random.below(kDims.size())), random.keys(random.below(20), 50));
  return lists;
}

TEST(a_lookup_is_parsed_as_it_was_written) {
  Random random(1);
  for (int round = 0; round < 500; ++round) {
    const auto lists = random_lists(random);
    const RowType wire = kWires[random.below(3)];
    const bool found = random.below(2);
    const Parsed parsed(lookup_payload(lists, wire, found));
    const ParsedLookup& lookup = parsed.lookup;
    CHECK(lookup.wire == wire && lookup.want_found == found && lookup.tables.size() == lists.size());
    size_t count = 0, bytes = 0;
    for (size_t i = 0; i < lists.size(); ++i) {
      const auto& [table, keys] = lists[i];
      CHECK(lookup.tables[i].table == table && lookup.tables[i].keys == keys.size());
      for (size_t k = 0; k < keys.size(); ++k) CHECK_EQ(lookup.keys[count + k], keys[k]);
      count += keys.size();
      const auto dim = static_cast<size_t>(kDims[table]);
      bytes += keys.size() * (wire == RowType::kFloat  ? 4 * dim
                              : wire == RowType::kHalf ? 4 * ((dim + 1) / 2)
                                                       : 4 * ((dim + 3) / 4) + 8);
    }
    CHECK_EQ(lookup.count, count);
    CHECK_EQ(answer_bytes(lookup, kDims), bytes + (found ? count : 0));
  }
}

TEST(every_malformed_lookup_is_refused) {
  const auto refuses = [](const std::vector<char>& payload, const char* why) {
    const auto said = testing::words_of<std::invalid_argument>([&] { Parsed parsed(payload); });
    if (said.find(why) == std::string::npos) testing::fail(__FILE__, __LINE__, "'" + said + "' instead of " + why);
  };
  const TableKeyLists lists{{0, {1, 2, 3}}, {3, {4}}};
  const auto valid = lookup_payload(lists);
  CHECK_EQ(Parsed(valid).lookup.count, 4u);
  for (size_t bytes = 0; bytes < valid.size(); ++bytes)
    CHECK_THROWS(std::invalid_argument, Parsed({valid.begin(), valid.begin() + static_cast<std::ptrdiff_t>(bytes)}));
  refuses({}, "without a head");
  refuses({1, 2, 3}, "without a head");

  auto changed = valid;
  changed.push_back(0);
  refuses(changed, "do not fill it");
  changed.resize(valid.size() + 8);
  refuses(changed, "do not fill it");
  for (const uint32_t tables : {3u, 4096u, 4097u, 0x20000000u, 0x80000000u, 0xffffffffu}) {
    put(changed = valid, 0, tables);
    refuses(changed, tables == 3 ? "" : "do not fit it");
  }
  for (const uint32_t wire : {3u, 4u, 255u, 65535u}) {
    put(changed = valid, 4, wire, 2);
    refuses(changed, "unknown wire type");
  }
  for (const uint32_t flags : {2u, 3u, 0x8000u, 0xffffu}) {
    put(changed = valid, 6, flags, 2);
    refuses(changed, "unknown flags");
  }
  for (const uint32_t table : {5u, 6u, 0x7fffffffu, 0xffffffffu}) {
    put(changed = valid, 16, table);
    refuses(changed, "that the model lacks");
  }
  for (const uint32_t keys : {0u, 2u, 4u, 0x20000000u, 0xffffffffu}) {
    put(changed = valid, 12, keys);
    refuses(changed, "do not fill it");
  }
  // Counts whose sum of bytes would be right in 32 bits.
  changed = valid;
  put(changed, 12, 0x20000002u);
  put(changed, 20, 2);
  refuses(changed, "do not fill it");
  // Few bytes that ask for many.
  const std::vector<int> wide{1 << 20};
  const auto large = lookup_payload({{0, Keys(65)}});
  CHECK_THROWS(std::invalid_argument, Parsed(large, wide));
  CHECK_EQ(Parsed(lookup_payload({{0, Keys(64)}}), wide).lookup.count, 64u);
}

// Random bytes are changed, added and removed. A payload is refused, or all that it says is inside it.
TEST(random_changes_of_lookups_are_refused_or_consistent) {
  Random random(2);
  int refused = 0, accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    auto payload = lookup_payload(random_lists(random), kWires[random.below(3)], random.below(2));
    for (size_t changes = random.below(4); changes > 0; --changes) {
      const size_t at = random.below(payload.size() + 1);
      const auto place = payload.begin() + static_cast<std::ptrdiff_t>(at);
      switch (random.below(4)) {
        case 0:
          payload.insert(place, random.below(20), static_cast<char>(random.bits()));
          break;
        case 1:
          payload.erase(place, payload.begin() + static_cast<std::ptrdiff_t>(
                                                     std::min<size_t>(payload.size(), at + random.below(20))));
          break;
        case 2:  // mostly in the head and the counts
          payload.resize(std::max<size_t>(payload.size(), 8));
          payload[random.below(std::min<size_t>(payload.size(), 32))] ^= static_cast<char>(1 << random.below(8));
          break;
        default:
          if (at < payload.size()) payload[at] = static_cast<char>(random.bits());
      }
    }
    try {
      const Parsed parsed(payload);
      const ParsedLookup& lookup = parsed.lookup;
      ++accepted;
      size_t count = 0;
      for (const TableKeys& table : lookup.tables) {
        CHECK(table.table < kDims.size());
        count += table.keys;
      }
      CHECK_EQ(lookup.count, count);
      CHECK_EQ(8 + lookup.tables.size() * 8 + count * 8, payload.size());
      CHECK(answer_bytes(lookup, kDims) <= kMostFrame);
      int64_t sum = 0;  // every key can be read
      for (size_t i = 0; i < lookup.count; ++i) sum ^= lookup.keys[i];
      CHECK(sum == sum);
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  CHECK(refused > 1000 && accepted > 1000);
}

TEST(rows_on_the_wire_decode_to_what_the_kernels_decode) {
  Random random(3);
  for (const RowType wire : kWires)
    for (const int dim : {1, 2, 3, 5, 8, 31, 64, 127}) {
      constexpr size_t kRows = 20;
      const auto values = random.reals(kRows * static_cast<size_t>(dim));
      const auto words = static_cast<size_t>(words_of(wire, dim));
      std::vector<uint32_t> encoded(kRows * words);
      std::vector<float> expected(values.size()), decoded(values.size());
      for (size_t i = 0; i < kRows; ++i) {
        encode_row(wire, values.data() + i * dim, dim, encoded.data() + i * words);
        kernels().decode(wire, reinterpret_cast<const char*>(encoded.data() + i * words), dim,
                         expected.data() + i * dim);
      }
      decode_rows(wire, reinterpret_cast<const char*>(encoded.data()), kRows, dim, decoded.data());
      CHECK(std::memcmp(decoded.data(), expected.data(), expected.size() * sizeof(float)) == 0);
      const float step = wire == RowType::kFloat ? 0 : wire == RowType::kHalf ? 0x1p-11f : 2.0f / 255;
      for (size_t i = 0; i < values.size(); ++i) CHECK(std::abs(decoded[i] - values[i]) <= step);
    }
  decode_rows(RowType::kFloat, nullptr, 0, 8, nullptr);
}

// The example of docs/formats/rows-protocol.md.
TEST(the_bytes_of_a_lookup_and_its_answer_are_those_of_the_format) {
  const unsigned char expected_lookup[] = {
      0x48, 0x52, 0x52, 0x31, 0x04, 0x00, 0x00, 0x00,  // magic "HRR1", kind 4 (lookup), error 0
      0x07, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 7
      0x30, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // 48 bytes of payload
      0x29, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // publication 41
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // oldest, unused
      0x02, 0x00, 0x00, 0x00, 0x01, 0x00, 0x01, 0x00,  // 2 tables, wire fp16, flags: found
      0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00,  // table 0, 2 keys
      0x01, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00,  // table 1, 1 key
      0x05, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // key 5 of table 0
      0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,  // key -1 of table 0
      0x06, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // key 6 of table 1
  };
  const auto lookup = testing::lookup_frame(7, 41, {{0, {5, -1}}, {1, {6}}}, RowType::kHalf, true);
  CHECK(lookup.size() == sizeof(expected_lookup) &&
        std::memcmp(lookup.data(), expected_lookup, sizeof(expected_lookup)) == 0);

  // A server at publication 42 that can read back to 41. Table 0 has 2 values a row, table 1 has 3.
  const std::vector<std::shared_ptr<Table>> tables{
      testing::make_read_only_table(2),
      std::make_shared<Table>(TableOptions{"t", 3, RuleKind::kSgd, {}, {InitialKind::kConstant, 0.5, 0}, 1, true},
                              std::make_shared<Budget>(0))};
  const int64_t five = 5, minus = -1;
  const float old_rows[] = {1, -2}, new_rows[] = {9, 9}, other[] = {0.25, 65504};
  tables[0]->assign(&five, 1, old_rows, 2, nullptr, nullptr);
  tables[0]->assign(&minus, 1, other, 2, nullptr, nullptr);
  const auto service = std::make_shared<RowService>(tables, 41, 4, 1 << 20);
  auto before = service->prepare({{0, {5}}});
  service->begin_cut_over();
  tables[0]->assign(&five, 1, new_rows, 2, nullptr, nullptr);
  service->end_cut_over(42, &before);
  testing::TestServer server(service);
  testing::Peer peer = server.open();

  const unsigned char expected_answer[] = {
      0x48, 0x52, 0x52, 0x31, 0x05, 0x00, 0x00, 0x00,  // magic, kind 5 (rows), error 0
      0x07, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 7
      0x13, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // 19 bytes of payload
      0x29, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // publication 41
      0x29, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // the oldest that can be read: 41
      0x00, 0x3c, 0x00, 0xc0,                          // 1, -2
      0x00, 0x34, 0xff, 0x7b,                          // 0.25, 65504
      0x00, 0x38, 0x00, 0x38, 0x00, 0x38, 0x00, 0x00,  // 0.5 three times, and the zeros up to 4 bytes
      0x01, 0x01, 0x00,                                // found, found, not found
  };
  CHECK(peer.send(lookup));
  std::vector<unsigned char> answer(sizeof(expected_answer));
  CHECK_EQ(recv(peer.get(), answer.data(), answer.size(), MSG_WAITALL), static_cast<ssize_t>(answer.size()));
  CHECK(std::memcmp(answer.data(), expected_answer, sizeof(expected_answer)) == 0);

  const unsigned char expected_error[] = {
      0x48, 0x52, 0x52, 0x31, 0x06, 0x00, 0x01, 0x00,  // magic, kind 6 (error), error 1: behind
      0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 8
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // no text
      0x2a, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // publication 42 is in service
      0x29, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // oldest 41
  };
  answer.resize(sizeof(expected_error));
  CHECK(peer.send(testing::lookup_frame(8, 43, {{0, {5}}})));
  CHECK_EQ(recv(peer.get(), answer.data(), answer.size(), MSG_WAITALL), static_cast<ssize_t>(answer.size()));
  CHECK(std::memcmp(answer.data(), expected_error, sizeof(expected_error)) == 0);
}

}  // namespace
}  // namespace hotrow
