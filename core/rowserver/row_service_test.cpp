// Lookups at a named publication beside cut-overs: every answer has one publication's rows, and neither side starves.
#include "rowserver/row_service.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "rowserver/row_protocol.h"
#include "testing/faulty_files.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Keys;
using testing::keys_from;
using testing::Random;
using testing::row_of;
using testing::ServedRows;
using testing::TableKeyLists;

// One lookup: its payload, and memory for the answer.
struct Asked {
  Asked(const RowService& service, const TableKeyLists& lists, RowType wire = RowType::kFloat, bool found = false)
      : bytes(testing::lookup_payload(lists, wire, found)), payload((bytes.size() + 7) / 8) {
    std::memcpy(payload.data(), bytes.data(), bytes.size());
    parse_lookup(reinterpret_cast<const char*>(payload.data()), bytes.size(), service.dims(), lookup);
    answer.resize((answer_bytes(lookup, service.dims()) + 7) / 8);
  }
  RowService::Reply read(const RowService& service, int64_t publication) {
    return service.read(lookup, publication, out(), scratch);
  }
  char* out() { return reinterpret_cast<char*>(answer.data()); }
  const float* rows() const { return reinterpret_cast<const float*>(answer.data()); }

  std::vector<char> bytes;
  std::vector<int64_t> payload;
  ParsedLookup lookup;
  std::vector<int64_t> answer;
  RowService::Scratch scratch;
};

TEST(a_lookup_at_any_kept_publication_reads_its_rows) {
  const std::vector<int> dims{8, 5};
  constexpr size_t kKeys = 200;
  constexpr int64_t kKept = 4;
  ServedRows rows(dims, kKeys, kKept);
  Random random(1);
  // By table and key: the publications that wrote it.
  std::vector<std::vector<Keys>> written(2, std::vector<Keys>(kKeys, Keys{1}));
  for (int64_t number = 2; number <= 30; ++number) {
    TableKeyLists changed;
    for (uint32_t table = 0; table < 2; ++table) {
      Keys keys;
      for (int64_t key = 0; key < static_cast<int64_t>(kKeys); ++key)
        if (random.below(3) == 0) keys.push_back(key);
      for (const int64_t key : keys) written[table][key].push_back(number);
      changed.emplace_back(table, keys);
    }
    rows.publish(changed);
    CHECK_EQ(rows.service->publication(), number);
    CHECK_EQ(rows.service->oldest(), std::max<int64_t>(1, number - kKept));
    for (const RowType wire : {RowType::kFloat, RowType::kHalf, RowType::kByte})
      for (int64_t publication = number - kKept - 1; publication <= number + 1; ++publication) {
        const TableKeyLists lists{{1, random.keys(20, 5)}, {0, keys_from(static_cast<int64_t>(random.below(150)), 50)}};
        Asked asked(*rows.service, lists, wire, true);
        const auto reply = asked.read(*rows.service, publication);
        CHECK_EQ(reply.oldest, rows.service->oldest());
        if (publication > number || publication < reply.oldest) {
          CHECK(reply.error == (publication > number ? RowError::kBehind : RowError::kTooNew));
          CHECK_EQ(reply.publication, number);
          continue;
        }
        CHECK(reply.error == RowError::kNone && reply.publication == publication);
        const char* at = asked.out();
        const char* found = at + answer_bytes(asked.lookup, dims) - asked.lookup.count;
        for (const auto& [table, keys] : lists)
          for (const int64_t key : keys) {
            const int dim = dims[table];
            const bool exists = key >= 0 && key < static_cast<int64_t>(kKeys);
            std::vector<float> expected(dim);
            if (exists) {
              int64_t by = 0;
              for (const int64_t each : written[table][key])
                if (each <= publication) by = each;
              expected = row_of(by, table, key, dim);
            } else {
              rows.tables[table]->write_initial_values(key, expected.data());
            }
            std::vector<uint32_t> encoded(words_of(wire, dim));
            encode_row(wire, expected.data(), dim, encoded.data());
            CHECK(std::memcmp(at, encoded.data(), encoded.size() * 4) == 0);
            CHECK_EQ(*found++, static_cast<char>(exists));
            at += encoded.size() * 4;
          }
      }
  }
  const auto figures = rows.service->figures();
  CHECK(figures.lookups > 0 && figures.keys == figures.lookups * 70 && figures.restored > 0);
  CHECK(figures.history_entries == static_cast<size_t>(kKept) && figures.history_bytes > 0);
}

TEST(large_lookups_are_encoded_in_blocks) {
  const std::vector<int> dims{3};
  ServedRows rows(dims, 40'000);
  rows.publish({{0, keys_from(0, 40'000)}});
  for (const RowType wire : {RowType::kFloat, RowType::kHalf, RowType::kByte}) {
    Asked asked(*rows.service, {{0, keys_from(10, 39'990)}, {0, keys_from(0, 17'000)}}, wire, true);
    CHECK(asked.read(*rows.service, 1).error == RowError::kNone);
    const auto words = static_cast<size_t>(words_of(wire, 3));
    std::vector<uint32_t> encoded(words);
    size_t wrong = 0;
    for (size_t i = 0; i < asked.lookup.count; ++i) {
      encode_row(wire, row_of(1, 0, asked.lookup.keys[i], 3).data(), 3, encoded.data());
      wrong += std::memcmp(asked.out() + i * words * 4, encoded.data(), words * 4) != 0;
      wrong += asked.out()[asked.lookup.count * words * 4 + i] != 1;
    }
    CHECK_EQ(wrong, 0u);
    CHECK(asked.scratch.rows.bytes() < 3 * 40'000 * sizeof(float));
  }
}

// Each publication writes its number into all rows, so an answer that mixes two shows it. Readers ask without a pause,
// and yet every cut-over comes through.
TEST(lookups_beside_cut_overs_never_mix_publications_and_do_not_starve_them) {
  const std::vector<int> dims{8, 5};
  constexpr size_t kKeys = 300;
  ServedRows rows(dims, kKeys, 3);
  const TableKeyLists all{{0, keys_from(0, kKeys)}, {1, keys_from(0, kKeys)}};
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, read{0}, behind{0}, too_new{0};
  std::vector<std::thread> readers;
  for (uint64_t seed = 1; seed <= 3; ++seed)
    readers.emplace_back([&, seed] {
      Random random(seed);
      Asked asked(*rows.service, all, RowType::kFloat, true);
      while (!stop) {
        const int64_t publication = rows.service->publication() - 3 + static_cast<int64_t>(random.below(5));
        const auto reply = asked.read(*rows.service, publication);
        if (reply.error != RowError::kNone) {
          wrong += reply.error == RowError::kBehind ? publication <= reply.publication : publication >= reply.oldest;
          ++(reply.error == RowError::kBehind ? behind : too_new);
          continue;
        }
        wrong += reply.publication != publication;
        const float* at = asked.rows();
        for (const auto& [table, keys] : all)
          for (const int64_t key : keys) {
            const auto expected = row_of(publication, table, key, dims[table]);
            wrong += std::memcmp(at, expected.data(), expected.size() * sizeof(float)) != 0;
            at += dims[table];
          }
        ++read;
      }
    });
  for (int published = 0; published < 200 || (read < 200 && wrong == 0); ++published) rows.publish(all);
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK(read >= 200 && behind > 0);
}

TEST(a_cut_over_that_took_several_publications_refuses_those_between) {
  ServedRows rows({4}, 10);
  const auto error_at = [&](int64_t publication) {
    return Asked(*rows.service, {{0, {1}}}).read(*rows.service, publication).error;
  };
  auto before = rows.service->prepare({{0, {1}}});
  rows.service->begin_cut_over();
  testing::assign_rows(*rows.tables[0], 0, 5, {1});
  rows.service->end_cut_over(5, &before);
  CHECK(error_at(1) == RowError::kNone && error_at(5) == RowError::kNone);
  for (int64_t between : {2, 3, 4}) CHECK(error_at(between) == RowError::kTooNew);
  CHECK(error_at(6) == RowError::kBehind && error_at(0) == RowError::kTooNew);
}

TEST(a_cut_over_can_be_abandoned_and_tables_can_be_replaced) {
  ServedRows rows({4, 2}, 10);
  RowService& service = *rows.service;
  rows.publish({{0, {1, 2}}});
  service.begin_cut_over();
  service.abandon_cut_over();
  CHECK(service.publication() == 2 && service.oldest() == 1);
  Asked asked(service, {{0, {1}}});
  CHECK(asked.read(service, 1).error == RowError::kNone);
  CHECK_EQ(asked.rows()[0], row_of(1, 0, 1, 4)[0]);

  service.begin_cut_over();
  CHECK_THROWS(std::invalid_argument, service.replace_tables({rows.tables[0]}));
  CHECK_THROWS(std::invalid_argument, service.replace_tables({rows.tables[1], rows.tables[0]}));
  ServedRows others({4, 2}, 10);
  testing::assign_rows(*others.tables[0], 0, 9, {1});
  service.replace_tables(others.tables);
  service.end_cut_over(9, nullptr);
  CHECK(service.publication() == 9 && service.oldest() == 9);
  CHECK(asked.read(service, 2).error == RowError::kTooNew);
  CHECK(asked.read(service, 9).error == RowError::kNone);
  CHECK_EQ(asked.rows()[0], row_of(9, 0, 1, 4)[0]);

  auto before = service.prepare({{0, {1}}});  // an older publication is put back under its old number
  service.begin_cut_over();
  service.end_cut_over(4, &before);
  CHECK(service.publication() == 4 && service.oldest() == 4);
  CHECK(asked.read(service, 9).error == RowError::kBehind);

  CHECK(!service.is_retired());
  service.retire();
  CHECK(service.is_retired());
}

// Rows on SSD are found to be cold, read at the right publication, and an error of the disk leaves the gate open.
TEST(cold_rows_are_read_at_their_publication) {
  testing::TempFolder folder;
  WithFaults disk;
  constexpr size_t kKeys = 5000;
  testing::SsdRows cold(folder / "rows", kKeys);
  RowService& service = *cold.rows.service;
  const Keys some = keys_from(100, 300);
  Asked asked(service, {{0, some}}), warm(service, {{1, some}});
  CHECK(service.is_cold(asked.lookup) && !service.is_cold(warm.lookup));
  disk->fail(1, EIO);
  CHECK_THROWS(IoError, asked.read(service, 1));
  cold.rows.publish({{0, keys_from(0, 250)}});
  CHECK(asked.read(service, 1).error == RowError::kNone);
  size_t wrong = 0;
  for (size_t i = 0; i < some.size(); ++i) wrong += asked.rows()[i * 8] != row_of(1, 0, some[i], 8)[0];
  CHECK(asked.read(service, 2).error == RowError::kNone);
  for (size_t i = 0; i < some.size(); ++i)
    wrong += asked.rows()[i * 8] != row_of(some[i] < 250 ? 2 : 1, 0, some[i], 8)[0];
  CHECK_EQ(wrong, 0u);
  CHECK(cold.rows.tables[0]->prefetch(some.data(), some.size()) > 0);
  CHECK(!service.is_cold(asked.lookup));
}

}  // namespace
}  // namespace hotrow
