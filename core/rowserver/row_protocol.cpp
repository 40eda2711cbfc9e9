#include "rowserver/row_protocol.h"

#include <cstring>
#include <stdexcept>

#include "kernels/row_kernels.h"

namespace hotrow {
namespace {

void append(std::vector<char>& out, const void* data, size_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  out.insert(out.end(), begin, begin + bytes);
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
  if (head.flags & ~kWantFound) throw std::invalid_argument("a lookup with unknown flags");
  out.wire = static_cast<RowType>(head.wire);
  out.want_found = head.flags & kWantFound;
  out.tables.resize(head.tables);
  if (head.tables) std::memcpy(out.tables.data(), payload + sizeof(head), head.tables * sizeof(TableKeys));
  out.count = 0;
  for (const TableKeys& table : out.tables) {
    if (table.table >= dims.size()) throw std::invalid_argument("a lookup in a table that the model lacks");
    out.count += table.keys;
  }
  const size_t before = sizeof(head) + head.tables * sizeof(TableKeys);
  if (bytes != before + out.count * sizeof(int64_t)) throw std::invalid_argument("a lookup whose keys do not fill it");
  if (answer_bytes(out, dims) > kMostFrame) throw std::invalid_argument("a lookup whose answer is too large");
  out.keys = reinterpret_cast<const int64_t*>(payload + before);
}

size_t answer_bytes(const ParsedLookup& lookup, const std::vector<int>& dims) {
  size_t bytes = 0;
  for (const TableKeys& table : lookup.tables)
    bytes += size_t{table.keys} * static_cast<size_t>(words_of(lookup.wire, dims[table.table])) * sizeof(uint32_t);
  return bytes + (lookup.want_found ? lookup.count : 0);
}

void write_lookup_head(const std::vector<TableKeys>& tables, RowType wire, bool want_found, std::vector<char>& out) {
  const LookupHead head{static_cast<uint32_t>(tables.size()), static_cast<uint16_t>(wire),
                        want_found ? kWantFound : uint16_t{0}};
  append(out, &head, sizeof(head));
  append(out, tables.data(), tables.size() * sizeof(TableKeys));
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
