#include "rowserver/row_protocol.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/row_kernels.h"

namespace hotrow {
namespace {

void append(std::vector<char>& out, const void* data, size_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  out.insert(out.end(), begin, begin + bytes);
}

// Reads a pooled lookup's bags and offsets; returns their bytes.
size_t parse_bags(const char* data, size_t bytes, ParsedLookup& out) {
  const size_t tables = out.tables.size();
  if (bytes < tables * sizeof(TableBags)) throw std::invalid_argument("a lookup whose bags do not fit it");
  out.bags.resize(tables);
  if (tables) std::memcpy(out.bags.data(), data, tables * sizeof(TableBags));
  size_t count = 0;
  for (const TableBags& one : out.bags) {
    if (one.pooling != static_cast<uint32_t>(Pooling::kSum) && one.pooling != static_cast<uint32_t>(Pooling::kMean))
      throw std::invalid_argument("a lookup with an unknown pooling");
    count += size_t{one.bags} + 1;
  }
  const size_t size = (count * sizeof(uint32_t) + 7) / 8 * 8;
  if (bytes - tables * sizeof(TableBags) < size) throw std::invalid_argument("a lookup whose offsets do not fit it");
  out.offsets.resize(count);
  if (count) std::memcpy(out.offsets.data(), data + tables * sizeof(TableBags), count * sizeof(uint32_t));
  const uint32_t* offsets = out.offsets.data();
  for (size_t i = 0; i < tables; offsets += out.bags[i].bags + 1, ++i) {
    const uint32_t* end = offsets + out.bags[i].bags;
    if (*offsets != 0 || *end != out.tables[i].keys || !std::is_sorted(offsets, end + 1))
      throw std::invalid_argument("a lookup whose offsets do not divide its keys");
    for (const uint32_t* bag = offsets; bag < end; ++bag)
      if (bag[1] - bag[0] > kMostBag) throw std::invalid_argument("a lookup with a bag of too many keys");
  }
  return tables * sizeof(TableBags) + size;
}

}  // namespace

void parse_lookup(const char* payload, size_t bytes, const std::vector<int>& dims, ParsedLookup& out) {
  LookupHead head;
  if (bytes < sizeof(head)) throw std::invalid_argument("a lookup without a head");
  std::memcpy(&head, payload, sizeof(head));
  if (head.tables > kMostTables || bytes < sizeof(head) + head.tables * sizeof(TableKeys))
    throw std::invalid_argument("a lookup whose tables do not fit it");
  if (head.wire >= kRowTypes || static_cast<RowType>(head.wire) == RowType::kBFloat)
    throw std::invalid_argument("a lookup with an unknown wire type");
  if (head.flags & ~(kWantFound | kPooled) || head.flags == (kWantFound | kPooled))
    throw std::invalid_argument("a lookup with unknown flags");
  out.wire = static_cast<RowType>(head.wire);
  out.want_found = head.flags & kWantFound;
  out.pooled = head.flags & kPooled;
  out.tables.resize(head.tables);
  if (head.tables) std::memcpy(out.tables.data(), payload + sizeof(head), head.tables * sizeof(TableKeys));
  out.count = 0;
  for (const TableKeys& table : out.tables) {
    if (table.table >= dims.size()) throw std::invalid_argument("a lookup in a table that the model lacks");
    out.count += table.keys;
  }
  size_t before = sizeof(head) + head.tables * sizeof(TableKeys);
  if (out.pooled) before += parse_bags(payload + before, bytes - before, out);
  if (bytes != before + out.count * sizeof(int64_t)) throw std::invalid_argument("a lookup whose keys do not fill it");
  if (answer_bytes(out, dims) > kMostFrame) throw std::invalid_argument("a lookup whose answer is too large");
  out.keys = reinterpret_cast<const int64_t*>(payload + before);
}

size_t answer_bytes(const ParsedLookup& lookup, const std::vector<int>& dims) {
  size_t bytes = 0;
  for (size_t i = 0; i < lookup.tables.size(); ++i)
    bytes += size_t{answer_rows(lookup, i)} * static_cast<size_t>(words_of(lookup.wire, dims[lookup.tables[i].table])) *
             sizeof(uint32_t);
  return bytes + (lookup.want_found ? lookup.count : 0);
}

void write_lookup_head(const std::vector<TableKeys>& tables, RowType wire, bool want_found, std::vector<char>& out) {
  const LookupHead head{static_cast<uint32_t>(tables.size()), static_cast<uint16_t>(wire),
                        want_found ? kWantFound : uint16_t{0}};
  append(out, &head, sizeof(head));
  append(out, tables.data(), tables.size() * sizeof(TableKeys));
}

void write_pooled_head(TableKeys table, TableBags bags, const uint32_t* offsets, RowType wire, std::vector<char>& out) {
  const LookupHead head{1, static_cast<uint16_t>(wire), kPooled};
  append(out, &head, sizeof(head));
  append(out, &table, sizeof(table));
  append(out, &bags, sizeof(bags));
  append(out, offsets, (size_t{bags.bags} + 1) * sizeof(uint32_t));
  out.resize((out.size() + 7) / 8 * 8);
}

void decode_rows(RowType wire, const char* rows, size_t count, int dim, float* out) {
  if (wire == RowType::kFloat) {
    if (count) std::memcpy(out, rows, count * static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  const size_t bytes = static_cast<size_t>(words_of(wire, dim)) * sizeof(uint32_t);
  const auto decode = kernels().decode;
  for (size_t i = 0; i < count; ++i) decode(wire, rows + i * bytes, dim, out + i * dim);
}

}  // namespace hotrow
