#include "rowserver/row_client.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace hotrow {
namespace {

using Clock = RowClient::Clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kTimes = 256, kTimesPerUpdate = 32;
constexpr size_t kMostKeys = 65536, kMostAnswer = size_t{4} << 20;  // of one frame, so that it fits a slot
constexpr double kPause = 0.001, kLongPause = 0.02;                 // seconds before the same server is asked again
constexpr int64_t kLongestPoll = 1000;                              // milliseconds
constexpr double kFirstHedge = 0.005, kLongestHedge = 1.0, kNewTime = 0.1, kLeastTime = 20e-6;

Clock::time_point after(Clock::time_point now, double seconds) {
  return now + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

}  // namespace

struct RowClient::Server {
  mutable std::mutex mutex;  // guards the connections
  std::vector<std::unique_ptr<RowConnection>> idle;
  std::vector<RowConnection*> leased;
  std::unique_ptr<RowConnection> for_pings;
  std::mutex ping_mutex;
  std::atomic<size_t> connections{0};  // idle and leased
  std::atomic<int64_t> publication{-1}, oldest{-1};
  std::atomic<uint32_t> in_flight{0};
  std::atomic<double> seconds{0};
  std::atomic<uint64_t> answers{0}, errors{0};

  // A connection, preferably one that owes no answer; null if all are in use.
  std::unique_ptr<RowConnection> lease() {
    const std::lock_guard lock(mutex);
    std::erase_if(idle, [this](const auto& connection) {
      if (connection->is_broken()) connections.fetch_sub(1, std::memory_order_relaxed);
      return connection->is_broken();
    });
    if (idle.empty()) return nullptr;
    auto found = std::find_if(idle.rbegin(), idle.rend(), [](const auto& one) { return !one->owes_answers(); });
    auto place = found == idle.rend() ? idle.begin() : std::prev(found.base());
    auto connection = std::move(*place);
    idle.erase(place);
    leased.push_back(connection.get());
    in_flight.fetch_add(1, std::memory_order_relaxed);
    return connection;
  }

  void release(std::unique_ptr<RowConnection> connection) {
    const std::lock_guard lock(mutex);
    std::erase(leased, connection.get());
    in_flight.fetch_sub(1, std::memory_order_relaxed);
    if (connection->is_broken())
      connections.fetch_sub(1, std::memory_order_relaxed);
    else
      idle.push_back(std::move(connection));
  }

  // The publications that an answer tells.
  void note(const FrameHeader& header) {
    publication.store(
        header.kind == FrameKind::kRows ? std::max(header.publication, publication.load()) : header.publication,
        std::memory_order_relaxed);
    oldest.store(header.oldest, std::memory_order_relaxed);
  }

  void note_time(double took) {
    const double before = seconds.load(std::memory_order_relaxed);
    seconds.store(before == 0 ? took : before + kNewTime * (took - before), std::memory_order_relaxed);
  }
};

struct RowClient::Attempt {
  Attempt(Server* to, uint32_t its_number, std::unique_ptr<RowConnection> leased, Clock::time_point now, bool hedges)
      : server(to), number(its_number), connection(std::move(leased)), began(now), hedge(hedges) {}
  Attempt(Attempt&&) = default;
  Attempt& operator=(Attempt&&) = default;
  ~Attempt() { release(); }

  void release() {
    if (!connection) return;
    connection->abandon();
    server->release(std::move(connection));
  }
  // Releases a connection whose answer is not there yet. The time so far counts, or a server that never answers would
  // look fast.
  void give_up(Clock::time_point now) {
    server->note_time(Seconds(now - began).count());
    release();
  }

  Server* server;
  uint32_t number;
  std::unique_ptr<RowConnection> connection;
  Clock::time_point began;
  bool hedge;
};

// Some keys of one range, and the requests for them in progress.
struct RowClient::Part {
  size_t range = 0;
  std::vector<TableKeys> tables;
  std::vector<char> head;
  const int64_t* keys = nullptr;
  size_t count = 0;
  float* out = nullptr;
  bool* found = nullptr;

  std::vector<Attempt> attempts;
  std::vector<std::pair<uint32_t, Clock::time_point>> avoid;  // servers, and until when
  Clock::time_point hedge_at = Clock::time_point::max();  // when to ask one more server, with an attempt in progress
  Clock::time_point retry_at{};                           // the same without one
  RowError error = RowError::kNone;
  size_t too_new = 0;  // servers that cannot read the publication any more
  bool done = false, gave_up = false;

  bool avoids(uint32_t number, Clock::time_point now) const {
    return std::any_of(avoid.begin(), avoid.end(),
                       [&](const auto& one) { return one.first == number && one.second > now; });
  }
  bool asks(uint32_t number) const {
    return std::any_of(attempts.begin(), attempts.end(), [&](const auto& one) { return one.number == number; });
  }
};

RowClient::RowClient(std::vector<int> dims, Options options)
    : dims_(std::move(dims)), options_(options), hedge_after_(std::max(kFirstHedge, options.hedge_least)) {}

RowClient::~RowClient() = default;

RowClient::Server& RowClient::at(uint32_t number) const {
  const std::lock_guard lock(servers_mutex_);
  return *servers_.at(number);
}

uint32_t RowClient::add_server() {
  const std::lock_guard lock(servers_mutex_);
  servers_.push_back(std::make_unique<Server>());
  return static_cast<uint32_t>(servers_.size() - 1);
}

void RowClient::add_connection(uint32_t number, std::unique_ptr<RowConnection> connection, bool for_pings) {
  Server& server = at(number);
  const std::lock_guard pinging(server.ping_mutex);
  const std::lock_guard lock(server.mutex);
  if (for_pings) {
    server.for_pings = std::move(connection);
    return;
  }
  server.idle.push_back(std::move(connection));
  server.connections.fetch_add(1, std::memory_order_relaxed);
}

void RowClient::disconnect(uint32_t number) {
  Server& server = at(number);
  {
    const std::lock_guard lock(server.mutex);
    for (const auto& connection : server.idle) connection->shut_down();
    for (RowConnection* connection : server.leased) connection->shut_down();
    server.connections.fetch_sub(server.idle.size(), std::memory_order_relaxed);
    server.idle.clear();
    if (server.for_pings) server.for_pings->shut_down();  // a ping in progress ends
  }
  const std::lock_guard pinging(server.ping_mutex);
  const std::lock_guard lock(server.mutex);
  if (server.for_pings && server.for_pings->is_broken()) server.for_pings.reset();
}

bool RowClient::ping(uint32_t number, double seconds) {
  Server& server = at(number);
  const std::lock_guard pinging(server.ping_mutex);
  if (!server.for_pings) return false;
  RowConnection& connection = *server.for_pings;
  const auto began = Clock::now(), deadline = after(began, seconds);
  connection.begin({FrameKind::kPing, 0, nullptr, 0, nullptr, 0});
  while (true) {
    const auto progress = connection.advance();
    if (progress == RowConnection::Progress::kBroken) return false;
    if (progress == RowConnection::Progress::kComplete) break;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      connection.abandon();
      return false;
    }
    pollfd wait{connection.descriptor(), connection.events(), 0};
    ::poll(&wait, 1, static_cast<int>(std::min<int64_t>(left, kLongestPoll)));
  }
  if (connection.header().kind != FrameKind::kPong) return false;
  server.note(connection.header());
  server.note_time(Seconds(Clock::now() - began).count());
  return true;
}

RowClient::ServerState RowClient::server(uint32_t number) const {
  const Server& server = at(number);
  const size_t connections = server.connections.load(std::memory_order_relaxed);
  return {connections,
          connections > 0,
          server.publication.load(std::memory_order_relaxed),
          server.oldest.load(std::memory_order_relaxed),
          server.in_flight.load(std::memory_order_relaxed),
          server.seconds.load(std::memory_order_relaxed),
          server.answers.load(std::memory_order_relaxed),
          server.errors.load(std::memory_order_relaxed)};
}

// --- a lookup ---

RowLookupResult RowClient::lookup(const Lookup& lookup) {
  RowLookupResult result;
  result.late.assign(lookup.servers->size(), 0);
  result.errors.assign(lookup.servers->size(), RowError::kNone);
  std::vector<Part> parts = split(lookup);
  const auto deadline = after(Clock::now(), std::max(0.0, lookup.seconds));
  for (Part& part : parts) start(part, lookup, Clock::now(), result);
  std::vector<pollfd> waits;
  while (true) {
    auto next = deadline;
    waits.clear();
    for (const Part& part : parts) {
      if (part.done) continue;
      for (const Attempt& attempt : part.attempts)
        waits.push_back({attempt.connection->descriptor(), attempt.connection->events(), 0});
      next = std::min(next, part.attempts.empty() ? part.retry_at : part.hedge_at);
    }
    const bool done = std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.done; });
    auto now = Clock::now();
    if (done || now >= deadline) break;
    const auto left = std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(next - now).count());
    const timespec wait{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
    ppoll(waits.data(), waits.size(), &wait, nullptr);
    now = Clock::now();
    for (Part& part : parts)
      if (!part.done) advance(part, lookup, now, result);
  }
  for (Part& part : parts) {
    for (Attempt& attempt : part.attempts) attempt.give_up(Clock::now());
    if (part.done && !part.gave_up) continue;
    result.late[part.range] = 1;
    result.errors[part.range] = part.error;
  }
  return result;
}

// Frames of at most kMostKeys keys, kMostAnswer bytes (or one row) and kMostTables tables.
std::vector<RowClient::Part> RowClient::split(const Lookup& lookup) const {
  std::vector<Part> parts;
  const int64_t* keys = lookup.keys;
  float* out = lookup.out;
  bool* found = lookup.found;
  for (size_t range = 0; range < lookup.servers->size(); ++range) {
    size_t answer = 0;
    Part* part = nullptr;
    const auto& counts = (*lookup.counts)[range];
    for (size_t i = 0; i < lookup.tables->size(); ++i) {
      const uint32_t table = (*lookup.tables)[i];
      const int dim = dims_.at(table);
      const size_t row = static_cast<size_t>(words_of(options_.wire, dim)) * sizeof(uint32_t) + (found ? 1 : 0);
      for (size_t left = counts.at(i); left > 0;) {
        const size_t fits = part && part->tables.size() < kMostTables
                                ? std::min(kMostKeys - part->count, (kMostAnswer - std::min(answer, kMostAnswer)) / row)
                                : 0;
        if (fits == 0 && (!part || part->count > 0)) {
          parts.emplace_back();
          part = &parts.back();
          part->range = range;
          part->keys = keys;
          part->out = out;
          part->found = found;
          answer = 0;
          continue;
        }
        const size_t some = std::min(left, std::max<size_t>(fits, 1));
        part->tables.push_back({table, static_cast<uint32_t>(some)});
        part->count += some;
        answer += some * row;
        keys += some;
        out += some * static_cast<size_t>(dim);
        if (found) found += some;
        left -= some;
      }
    }
  }
  for (Part& part : parts) write_lookup_head(part.tables, options_.wire, lookup.found != nullptr, part.head);
  if (lookup.pooled)
    for (const PooledFeature& feature : *lookup.pooled) split_pooled(feature, parts);
  return parts;
}

// Frames of at most kMostKeys keys and kMostAnswer bytes, or of one bag.
void RowClient::split_pooled(const PooledFeature& feature, std::vector<Part>& parts) const {
  const int dim = dims_.at(feature.table);
  const size_t most_bags =
      std::max<size_t>(1, kMostAnswer / (static_cast<size_t>(words_of(options_.wire, dim)) * sizeof(uint32_t)));
  std::vector<uint32_t> offsets;
  for (size_t begin = 0; begin < feature.bags;) {
    const int64_t first = feature.offsets[begin];
    size_t end = begin + 1;
    while (end < feature.bags && end - begin < std::min(most_bags, kMostKeys) &&
           feature.offsets[end + 1] - first <= static_cast<int64_t>(kMostKeys))
      ++end;
    offsets.clear();
    for (size_t bag = begin; bag <= end; ++bag) offsets.push_back(static_cast<uint32_t>(feature.offsets[bag] - first));
    Part& part = parts.emplace_back();
    part.keys = feature.keys + first;
    part.count = offsets.back();
    part.out = feature.out + begin * static_cast<size_t>(dim);
    part.tables.push_back({feature.table, static_cast<uint32_t>(end - begin)});  // rows of the answer
    write_pooled_head({feature.table, offsets.back()},
                      {static_cast<uint32_t>(feature.pooling), static_cast<uint32_t>(end - begin)}, offsets.data(),
                      options_.wire, part.head);
    begin = end;
  }
}

// Sends a part to the best server that is not asked yet and has a free connection. Returns false if there is none now.
bool RowClient::start(Part& part, const Lookup& lookup, Clock::time_point now, RowLookupResult& result) {
  const auto& servers = (*lookup.servers)[part.range];
  const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
  const bool more = !part.attempts.empty();  // one more server, beside those that are asked already
  struct Candidate {
    Server* server;
    uint32_t number;
    double load;
  };
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < servers.size(); ++i) {
    const uint32_t number = servers[(i + turn) % servers.size()];
    Server& server = at(number);
    if (server.connections.load(std::memory_order_relaxed) == 0 || part.asks(number) || part.avoids(number, now))
      continue;
    double load = (server.in_flight.load(std::memory_order_relaxed) + 1) *
                  std::max(kLeastTime, server.seconds.load(std::memory_order_relaxed));
    const int64_t newest = server.publication.load(std::memory_order_relaxed);
    if (newest >= 0 && (newest < lookup.publication || lookup.publication < server.oldest.load())) {
      if (more) continue;
      load += 1e6;  // after all others
    }
    candidates.push_back({&server, number, load});
  }
  while (!candidates.empty()) {
    const auto best = std::min_element(candidates.begin(), candidates.end(),
                                       [](const Candidate& a, const Candidate& b) { return a.load < b.load; });
    if (auto connection = best->server->lease()) {
      part.attempts.emplace_back(best->server, best->number, std::move(connection), now, more);
      part.attempts.back().connection->begin({FrameKind::kLookup, lookup.publication, part.head.data(),
                                              part.head.size(), part.keys, part.count * sizeof(int64_t)});
      result.bytes += part.head.size() + part.count * sizeof(int64_t);
      part.hedge_at = more || !options_.hedges || servers.size() == 1
                          ? Clock::time_point::max()
                          : after(now, hedge_after_.load(std::memory_order_relaxed));
      return true;
    }
    candidates.erase(best);
  }
  part.retry_at = after(now, kPause);
  if (more) part.hedge_at = part.retry_at;
  return false;
}

void RowClient::advance(Part& part, const Lookup& lookup, Clock::time_point now, RowLookupResult& result) {
  for (size_t i = 0; i < part.attempts.size() && !part.done;) {
    Attempt& attempt = part.attempts[i];
    const auto progress = attempt.connection->advance();
    if (progress == RowConnection::Progress::kWaits) {
      ++i;
      continue;
    }
    const bool complete = progress == RowConnection::Progress::kComplete;
    if (complete) attempt.server->note(attempt.connection->header());
    if (complete && consume(part, lookup, *attempt.connection, result)) {
      const double took = Seconds(now - attempt.began).count();
      attempt.server->note_time(took);
      attempt.server->answers.fetch_add(1, std::memory_order_relaxed);
      note_time(took);
      if (attempt.hedge) ++result.hedges_won;
      part.done = true;
    } else {
      attempt.server->errors.fetch_add(1, std::memory_order_relaxed);
      part.error = complete ? attempt.connection->header().error : RowError::kNone;
      part.too_new += part.error == RowError::kTooNew;
      part.avoid.emplace_back(attempt.number, part.error == RowError::kTooNew   ? Clock::time_point::max()
                                              : part.error == RowError::kBehind ? after(now, kPause)
                                                                                : after(now, kLongPause));
      part.hedge_at = now;  // another one at once, if others are asked already
      ++result.retries;
    }
    attempt.release();
    part.attempts.erase(part.attempts.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (part.done) {
    for (Attempt& attempt : part.attempts) attempt.give_up(now);  // the loser of a hedge
    part.attempts.clear();
  } else if (part.attempts.empty() && part.too_new == (*lookup.servers)[part.range].size()) {
    part.done = part.gave_up = true;  // no server will have it again
  } else if (part.attempts.empty()) {
    if (now >= part.retry_at || part.error != RowError::kBehind) start(part, lookup, now, result);
  } else if (now >= part.hedge_at) {
    if (start(part, lookup, now, result)) ++result.hedges;
  }
}

// Puts an answer's rows in their places. Returns false for an error or an answer that does not fit the request.
bool RowClient::consume(Part& part, const Lookup& lookup, const RowConnection& connection,
                        RowLookupResult& result) const {
  const FrameHeader& header = connection.header();
  if (header.kind != FrameKind::kRows || header.error != RowError::kNone) return false;
  if (header.publication != lookup.publication) return false;
  size_t expected = part.found ? part.count : 0;
  for (const TableKeys& table : part.tables)
    expected +=
        size_t{table.keys} * static_cast<size_t>(words_of(options_.wire, dims_[table.table])) * sizeof(uint32_t);
  if (header.bytes != expected) return false;
  const char* rows = connection.payload();
  float* out = part.out;
  for (const TableKeys& table : part.tables) {
    const int dim = dims_[table.table];
    decode_rows(options_.wire, rows, table.keys, dim, out);
    rows += size_t{table.keys} * static_cast<size_t>(words_of(options_.wire, dim)) * sizeof(uint32_t);
    out += size_t{table.keys} * static_cast<size_t>(dim);
  }
  if (part.found)
    for (size_t i = 0; i < part.count; ++i) part.found[i] = rows[i] != 0;
  result.bytes += header.bytes;
  return true;
}

void RowClient::note_time(double seconds) {
  const std::lock_guard lock(times_mutex_);
  if (times_.size() < kTimes)
    times_.push_back(static_cast<float>(seconds));
  else
    times_[next_time_ % kTimes] = static_cast<float>(seconds);
  if (++next_time_ % kTimesPerUpdate) return;
  std::vector<float> sorted = times_;
  const size_t rank = sorted.size() * 95 / 100;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(rank), sorted.end());
  hedge_after_.store(std::max(options_.hedge_least, std::min<double>(sorted[rank], kLongestHedge)),
                     std::memory_order_relaxed);
}

}  // namespace hotrow
