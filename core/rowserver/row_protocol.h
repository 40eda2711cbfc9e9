// The frames between a row server and its clients: docs/formats/rows-protocol.md. Little endian.
//
//   lookup   LookupHead, TableKeys for each table, all keys (int64), table by table. If it is pooled, between the two:
//            TableBags for each table, and the offsets of all bags (uint32), padded to 8 bytes
//   rows     the rows table by table in the wire type (words_of() words each), then with kWantFound a byte for each key
//   error    a text; the header's `error` says what kind
//
// A request is checked completely before it is used (parse_lookup).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rows/row_type.h"

namespace hotrow {

enum class FrameKind : uint16_t {
  kChallenge = 1,  // server → client: the first frame of a connection
  kHello = 2,      // client → server: who it is, and the proof of the token
  kWelcome = 3,    // server → client: what it serves
  kLookup = 4,     // client → server
  kRows = 5,       // server → client
  kError = 6,      // server → client
  kPing = 7,       // client → server
  kPong = 8,       // server → client: its publication
};

enum class RowError : uint16_t {
  kNone = 0,
  kBehind = 1,     // the publication is not here yet
  kTooNew = 2,     // the publication is older than the history
  kMalformed = 3,  // the frame breaks the protocol
  kFailed = 4,     // the server could not read its rows
  kClosing = 5,    // the server shuts down; ask another one
};

struct FrameHeader {
  uint32_t magic;
  FrameKind kind;
  RowError error;       // of kError
  uint64_t id;          // the client's, returned in the answer
  uint64_t bytes;       // of the payload
  int64_t publication;  // lookup: the one to read. Answers: the one read, or (error, pong) the one in service
  int64_t oldest;       // answers: the oldest publication that the server can still read
};
static_assert(sizeof(FrameHeader) == 40 && std::endian::native == std::endian::little);
inline constexpr uint32_t kRowsMagic = 0x31525248;  // "HRR1"

inline constexpr uint16_t kWantFound = 1;  // the answer says which keys have a row
inline constexpr uint16_t kPooled = 2;     // the answer has a vector for each bag of keys, not a row for each key

struct LookupHead {
  uint32_t tables;
  uint16_t wire;  // RowType of the answer's rows: kFloat, kHalf or kByte
  uint16_t flags;
};
struct TableKeys {
  uint32_t table;  // its number in the model
  uint32_t keys;
};
struct TableBags {   // of a pooled lookup
  uint32_t pooling;  // Pooling::kSum or kMean
  uint32_t bags;
};
static_assert(sizeof(LookupHead) == 8 && sizeof(TableKeys) == 8 && sizeof(TableBags) == 8);

inline constexpr size_t kMostTables = 4096;
inline constexpr uint32_t kMostBag = 65536;              // keys of one bag
inline constexpr size_t kMostHello = 4096;               // bytes of a frame before the hello is proven
inline constexpr size_t kMostFrame = size_t{256} << 20;  // bytes of a request or an answer

// A checked lookup: where its keys are inside the payload.
struct ParsedLookup {
  RowType wire = RowType::kFloat;
  bool want_found = false;
  bool pooled = false;
  std::vector<TableKeys> tables;
  std::vector<TableBags> bags;    // by table, if pooled
  std::vector<uint32_t> offsets;  // bags + 1 of each table: where its bags begin among its keys
  const int64_t* keys = nullptr;
  size_t count = 0;  // keys of all tables
};

// `dims` by table number. Throws std::invalid_argument for a payload that breaks the protocol, or whose answer would
// exceed kMostFrame. The payload may change meanwhile (shared memory): everything but the keys is copied once and then
// checked. Requires: the payload is 8-byte aligned.
void parse_lookup(const char* payload, size_t bytes, const std::vector<int>& dims, ParsedLookup& out);
// Bytes of the answer's payload.
size_t answer_bytes(const ParsedLookup& lookup, const std::vector<int>& dims);
// Rows of the answer: one for each key, or for each bag.
inline uint32_t answer_rows(const ParsedLookup& lookup, size_t table) {
  return lookup.pooled ? lookup.bags[table].bags : lookup.tables[table].keys;
}
// Appends a lookup's payload up to the keys; the caller appends those. The second is for one table's bags, pooled.
void write_pooled_head(TableKeys table, TableBags bags, const uint32_t* offsets, RowType wire, std::vector<char>& out);
void write_lookup_head(const std::vector<TableKeys>& tables, RowType wire, bool want_found, std::vector<char>& out);
// Rows [count, dim] from the wire type to floats: the arithmetic of the store's own reads.
void decode_rows(RowType wire, const char* rows, size_t count, int dim, float* out);

}  // namespace hotrow
