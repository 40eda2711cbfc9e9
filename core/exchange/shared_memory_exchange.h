// All-to-all messages between the processes of one machine, through shared memory.
//
// Each process owns a segment: one control page and kDepth message areas. A segment is a memfd that peers open through
// /proc/<pid>/fd, so a crash leaves nothing behind. Exchanges are numbered from 1. For exchange n, each process writes
// its message into its own area n % kDepth and then stores n into `posted`; peers copy their parts out and store n into
// `taken`. All processes must begin the same exchanges in the same order, as with any collective. Exchanges complete in
// that order: waiting for one completes all earlier ones.
//
// An area is reused once every peer has taken exchange n - kDepth. Before a process waits for that, it completes its
// own exchanges up to n - kDepth. So there is no deadlock: the process that has begun the fewest exchanges never needs
// a peer to take anything first.
//
// Why not loopback TCP: it copies every byte twice in the kernel and competes with the compute threads for cores (18 ms
// of a core in a step that exchanges 11 MB each way, on 2 EPYC cores). This makes two plain copies on the calling
// thread.
//
// A waiting process checks 20 times a second whether its peer is still alive, because a killed process sends nothing.
//
// Threads: one caller at a time, except close().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace hotrow {

// How a peer opens a segment, and a number that identifies it.
struct SegmentAddress {
  int64_t process;
  int64_t descriptor;
  uint64_t token;
};

class SharedMemoryExchange {
 public:
  static constexpr uint32_t kDepth = 4;

  // `timeout`: seconds to wait for a peer.
  SharedMemoryExchange(size_t rank, size_t world, double timeout);
  ~SharedMemoryExchange();
  SharedMemoryExchange(const SharedMemoryExchange&) = delete;
  SharedMemoryExchange& operator=(const SharedMemoryExchange&) = delete;

  SegmentAddress address() const;
  // Throws if a segment cannot be opened: on another machine, or of another user's process.
  void connect(const std::vector<SegmentAddress>& peers);

  // Posts to[r] bytes for each process r, contiguous in `send`; with `broadcast`, the same to[0] bytes for all. wait()
  // puts from[r] bytes of each process r into `out`, in rank order. The own part is copied too (unless it is already in
  // place); without `own` it is not. Returns the exchange's number.
  uint32_t begin(const char* send, const std::vector<size_t>& to, bool broadcast, char* out,
                 const std::vector<size_t>& from, bool own = true);
  // Waits until exchange `number` and all before it are complete. Their `out` buffers must still be valid.
  void wait(uint32_t number);
  // Makes peers that wait for this process stop with an error. Any thread.
  void close();

 private:
  struct Control;
  struct Segment;
  struct Pending {
    char* out;
    std::vector<size_t> from;
  };

  char* reserve_area(uint32_t number, size_t bytes);
  void complete_next();
  void wait_until(size_t rank, const uint32_t& word, uint32_t number);

  const size_t rank_, world_;
  const double timeout_;
  std::vector<std::unique_ptr<Segment>> segments_;            // by rank
  uint32_t started_exchanges_ = 0, completed_exchanges_ = 0;  // wrap around after 2^32
  uint64_t posts_ = 0;
  std::deque<Pending> pending_;  // exchanges after completed_exchanges_
};

}  // namespace hotrow
