// Rows, frames and peers for tests of rowserver/.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/descriptor.h"
#include "rowserver/row_server.h"
#include "testing/tables.h"
#include "testing/test.h"

namespace hotrow::testing {

inline constexpr int kPatience = 30;  // seconds until a test gives up; a busy machine takes long

template <class Condition>
bool wait_until(Condition condition, double seconds = kPatience) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// --- rows ---

using Keys = std::vector<int64_t>;
using TableKeyLists = std::vector<std::pair<uint32_t, Keys>>;

inline std::shared_ptr<Table> make_read_only_table(int dim, size_t dram = 0, RowType type = RowType::kFloat) {
  return std::make_shared<Table>(
      TableOptions{"t", dim, RuleKind::kSgd, {}, {InitialKind::kUniform, -1, 1}, 42, true, type},
      std::make_shared<Budget>(dram));
}

// A row whose values tell the publication that wrote it, the table and the key.
inline std::vector<float> row_of(int64_t publication, uint32_t table, int64_t key, int dim) {
  std::vector<float> row(dim);
  for (int d = 0; d < dim; ++d)
    row[d] = static_cast<float>(publication * 1000 + table * 100) +
             static_cast<float>(static_cast<uint64_t>(key) % 97) + static_cast<float>(d % 4) * 0.25f;
  return row;
}

inline void assign_rows(Table& table, uint32_t number, int64_t publication, const Keys& keys) {
  std::vector<float> rows;
  for (const int64_t key : keys) {
    const auto row = row_of(publication, number, key, table.dim());
    rows.insert(rows.end(), row.begin(), row.end());
  }
  table.assign(keys.data(), keys.size(), rows.data(), table.dim(), nullptr, nullptr);
}

inline Keys keys_from(int64_t first, size_t count) {
  Keys keys(count);
  for (size_t i = 0; i < count; ++i) keys[i] = first + static_cast<int64_t>(i);
  return keys;
}

// A model with rows of publication 1 for the keys 0 to `keys`.
struct ServedRows {
  explicit ServedRows(const std::vector<int>& dims, size_t keys, size_t entries = 8, size_t bytes = size_t{64} << 20) {
    for (const int dim : dims) tables.push_back(make_read_only_table(dim));
    for (uint32_t t = 0; t < tables.size(); ++t) assign_rows(*tables[t], t, 1, keys_from(0, keys));
    service = std::make_shared<RowService>(tables, 1, entries, bytes);
  }
  // The next publication writes these rows.
  void publish(const TableKeyLists& changed) {
    std::vector<RowService::Change> changes;
    for (const auto& [table, keys] : changed) changes.push_back({table, keys});
    auto before = service->prepare(changes);
    const int64_t number = service->publication() + 1;
    service->begin_cut_over();
    for (const auto& [table, keys] : changed) assign_rows(*tables[table], table, number, keys);
    service->end_cut_over(number, &before);
  }
  std::vector<std::shared_ptr<Table>> tables;
  std::shared_ptr<RowService> service;
};

// A model of two tables, dims 8 and 4, with rows of publication 1. The first one's rows are on SSD only.
struct SsdRows {
  SsdRows(const std::string& folder, size_t keys) : rows({8, 4}, keys) {
    auto table = make_read_only_table(8, size_t{64} << 20);
    LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
    options.segment_bytes = size_t{1} << 18;
    options.buffer_bytes = size_t{1} << 15;
    table->attach(std::make_unique<Log>(options), true);
    assign_rows(*table, 0, 1, keys_from(0, keys));
    {
      const std::lock_guard lock(table->write_mutex());
      table->tier()->evict(table->size());
      table->tier()->log().seal();  // no write in the background is left
      table->recharge_budget();
    }
    rows.tables[0] = table;
    rows.service = std::make_shared<RowService>(rows.tables, 1, 8, size_t{64} << 20);
  }
  ServedRows rows;
};

// --- frames ---

struct Frame {
  FrameHeader header;
  std::vector<char> payload;
  std::string text() const { return {payload.begin(), payload.end()}; }
  const float* floats() const { return reinterpret_cast<const float*>(payload.data()); }
};

inline std::vector<char> lookup_payload(const TableKeyLists& lists, RowType wire = RowType::kFloat,
                                        bool want_found = false) {
  std::vector<TableKeys> tables;
  for (const auto& [table, keys] : lists) tables.push_back({table, static_cast<uint32_t>(keys.size())});
  std::vector<char> payload;
  write_lookup_head(tables, wire, want_found, payload);
  for (const auto& [table, keys] : lists) {
    const auto* begin = reinterpret_cast<const char*>(keys.data());
    payload.insert(payload.end(), begin, begin + keys.size() * sizeof(int64_t));
  }
  return payload;
}

inline std::vector<char> frame(FrameKind kind, uint64_t id, int64_t publication,
                               const std::vector<char>& payload = {}) {
  const FrameHeader header{kRowsMagic, kind, RowError::kNone, id, payload.size(), publication, 0};
  std::vector<char> bytes(sizeof(header) + payload.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!payload.empty()) std::memcpy(bytes.data() + sizeof(header), payload.data(), payload.size());
  return bytes;
}

inline std::vector<char> lookup_frame(uint64_t id, int64_t publication, const TableKeyLists& lists,
                                      RowType wire = RowType::kFloat, bool want_found = false) {
  return frame(FrameKind::kLookup, id, publication, lookup_payload(lists, wire, want_found));
}

// Whether an fp32 answer has these rows, all written by `publication`.
inline bool has_rows(const Frame& answer, int64_t publication, const TableKeyLists& lists,
                     const std::vector<int>& dims) {
  std::vector<float> expected;
  for (const auto& [table, keys] : lists)
    for (const int64_t key : keys) {
      const auto row = row_of(publication, table, key, dims[table]);
      expected.insert(expected.end(), row.begin(), row.end());
    }
  return answer.header.kind == FrameKind::kRows && answer.payload.size() == expected.size() * sizeof(float) &&
         (expected.empty() || std::memcmp(answer.payload.data(), expected.data(), answer.payload.size()) == 0);
}

// --- peers ---

// A blocking socket that sends and receives frames.
class Peer {
 public:
  explicit Peer(int descriptor) : socket_(descriptor) {
    const timeval patience{kPatience, 0};
    const int one = 1;
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  int get() const { return socket_.get(); }
  int release() { return socket_.release(); }
  void close() { socket_ = Descriptor(); }

  // False once the server has closed the connection.
  bool send(const std::vector<char>& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = ::send(socket_.get(), bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<size_t>(sent);
    }
    return true;
  }
  // Nothing once the server has closed the connection.
  std::optional<Frame> receive() {
    Frame frame;
    if (!receive(&frame.header, sizeof(frame.header))) return std::nullopt;
    CHECK_EQ(frame.header.magic, kRowsMagic);
    frame.payload.resize(frame.header.bytes);
    if (!receive(frame.payload.data(), frame.payload.size())) return std::nullopt;
    return frame;
  }
  // Waits until the server closes the connection, and drops what it sends before.
  bool is_closed() {
    char dropped[4096];
    ssize_t got;
    while ((got = ::recv(socket_.get(), dropped, sizeof(dropped), 0)) > 0) continue;
    return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }

 private:
  bool receive(void* out, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      const ssize_t got = ::recv(socket_.get(), static_cast<char*>(out) + at, bytes - at, 0);
      CHECK(got >= 0 || errno == ECONNRESET);  // a timeout: an answer is missing
      if (got <= 0) return false;
      at += static_cast<size_t>(got);
    }
    return true;
  }
  Descriptor socket_;
};

// A listening socket on a free port of loopback.
inline int listen_on_loopback(uint16_t& port, int backlog = 1024) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, plain, size) != 0 || ::listen(listener, backlog) != 0 || getsockname(listener, plain, &size) != 0)
    throw std::runtime_error("cannot listen on loopback");
  port = ntohs(address.sin_port);
  return listener;
}

// `receive_buffer`: bytes; small ones make a slow reader.
inline int connect_to(uint16_t port, int receive_buffer = 0) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  const int connected = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (receive_buffer) setsockopt(connected, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
  if (connect(connected, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    ::close(connected);
    throw std::runtime_error("cannot connect over loopback");
  }
  return connected;
}

// A row server on loopback. Its token is the word "open".
struct TestServer {
  explicit TestServer(std::shared_ptr<RowService> rows, RowServerOptions options = {}) : service(std::move(rows)) {
    server = std::make_unique<RowServer>(options, [this](std::string_view challenge, std::string_view hello) {
      CHECK_EQ(challenge.size(), 32u);
      if (hello != "open") throw std::runtime_error("another token");
      return RowServer::Proven{service, "welcome"};
    });
    server->listen(listen_on_loopback(port));
  }
  // Before the hello; its challenge was read.
  Peer connect(int receive_buffer = 0) const {
    Peer peer(connect_to(port, receive_buffer));
    const auto challenge = peer.receive();
    CHECK(challenge && challenge->header.kind == FrameKind::kChallenge && challenge->payload.size() == 32);
    return peer;
  }
  Peer open(int receive_buffer = 0) const {
    Peer peer = connect(receive_buffer);
    peer.send(frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'}));
    const auto welcome = peer.receive();
    CHECK(welcome && welcome->header.kind == FrameKind::kWelcome && welcome->text() == "welcome");
    return peer;
  }

  std::shared_ptr<RowService> service;
  uint16_t port = 0;
  std::unique_ptr<RowServer> server;
};

}  // namespace hotrow::testing
