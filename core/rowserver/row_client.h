// RowClient: reads rows from the row servers of a cluster by a deadline.
//
// A lookup's keys are sorted by shard range. Each range's keys go to one of its servers in one frame (or a few, for
// many keys), all at once; the calling thread then polls for all answers.
//
//   which server   connected, not known to be behind the publication, and the smallest load: (requests in flight + 1)
//                  times its recent time
//   hedge          after the 95th percentile of recent times the frame also goes to another server; the first answer
//                  wins
//   error          a broken connection, or a server that is behind, closes or fails: another server at once; the same
//                  one again after a pause. A server that cannot read the publication any more is not asked again
//   deadline       a range without an answer is late; a range that no server can read any more is late at once
//
// Python connects, proves the token, and adds the connections; it also pings each server on a connection of its own.
// Servers are numbered in the order in which they were added, and numbers are not reused.
//
// Threads: any number call `lookup`; any thread may call the others.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/row_kernels.h"
#include "rowserver/row_connection.h"

namespace hotrow {

struct RowLookupResult {
  std::vector<uint8_t> late;     // by range
  std::vector<RowError> errors;  // by range: the last error, of a late one
  uint64_t bytes = 0;
  uint32_t hedges = 0, hedges_won = 0, retries = 0;
};

// A feature whose bags the server pools: it sends a vector for each bag.
struct PooledFeature {
  uint32_t table;
  Pooling pooling;  // kSum or kMean
  size_t bags;
  const int64_t* offsets;  // bags + 1 of them, from 0
  const int64_t* keys;
  float* out;  // [bags, dim]
};

class RowClient {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    double hedge_least = 0.001;  // seconds
    bool hedges = true;
    RowType wire = RowType::kFloat;
  };

  struct Lookup {
    // Servers by range, each once. Keys are sorted by range, then by table.
    const std::vector<std::vector<uint32_t>>* servers;
    const std::vector<uint32_t>* tables;               // the tables' numbers
    const std::vector<std::vector<uint32_t>>* counts;  // keys by range and table
    const int64_t* keys;
    int64_t publication;
    double seconds;  // until the deadline
    float* out;      // the rows, in the order of the keys; undefined for late ranges
    bool* found;     // by key; may be null
    const std::vector<PooledFeature>* pooled = nullptr;  // read from range 0, which must have all shards
  };

  RowClient(std::vector<int> dims, Options options);
  ~RowClient();

  uint32_t add_server();
  // `number`: the server's. `for_pings`: kept for ping().
  void add_connection(uint32_t number, std::unique_ptr<RowConnection> connection, bool for_pings);
  // Closes all connections of a server; lookups in progress go to another one.
  void disconnect(uint32_t number);
  // Asks for the server's publication. Returns false if it does not answer in time; then call disconnect().
  bool ping(uint32_t number, double seconds);

  RowLookupResult lookup(const Lookup& lookup);

  struct ServerState {
    size_t connections;
    bool connected;
    int64_t publication, oldest;  // as of its last answer
    uint32_t in_flight;
    double seconds;  // recent time of an answer
    uint64_t answers, errors;
  };
  ServerState server(uint32_t number) const;
  double hedge_seconds() const { return hedge_after_.load(std::memory_order_relaxed); }

 private:
  struct Server;
  struct Attempt;
  struct Part;

  Server& at(uint32_t number) const;
  std::vector<Part> split(const Lookup& lookup) const;
  void split_pooled(const PooledFeature& feature, std::vector<Part>& parts) const;
  bool start(Part& part, const Lookup& lookup, Clock::time_point now, RowLookupResult& result);
  void advance(Part& part, const Lookup& lookup, Clock::time_point now, RowLookupResult& result);
  bool consume(Part& part, const Lookup& lookup, const RowConnection& connection, RowLookupResult& result) const;
  void note_time(double seconds);

  const std::vector<int> dims_;
  const Options options_;
  mutable std::mutex servers_mutex_;
  std::deque<std::unique_ptr<Server>> servers_;  // a server's address never changes
  std::mutex times_mutex_;
  std::vector<float> times_;  // a ring of recent times
  size_t next_time_ = 0;
  std::atomic<double> hedge_after_;
  std::atomic<uint32_t> turn_{0};
};

}  // namespace hotrow
