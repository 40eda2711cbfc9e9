// RowConnection: the client's end of a channel to a row server: a TCP connection, or a slot of shared memory.
//
// One request at a time is in progress: begin() sends it, and advance() moves bytes without blocking until the answer
// is complete. abandon() gives up on an answer that is still to come; the connection can then carry the next request,
// and skips the old answer when it arrives (frames have ids). After a failure is_broken() is true for good.
//
// Threads: one at a time, except shut_down(), which any thread may call to make the others' calls fail.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/buffer.h"
#include "rowserver/row_protocol.h"
#include "rowserver/shared_slots.h"
#include "rowserver/tls.h"

namespace hotrow {

class RowConnection {
 public:
  struct Request {  // its memory is the caller's until the answer is complete or abandoned
    FrameKind kind;
    int64_t publication;
    const char* head;  // LookupHead and TableKeys
    size_t head_bytes;
    const int64_t* keys;
    size_t keys_bytes;
  };
  enum class Progress { kWaits, kComplete, kBroken };

  virtual ~RowConnection() = default;
  // Sends what fits now. Requires: no request is in progress.
  virtual void begin(const Request& request) = 0;
  virtual Progress advance() = 0;
  virtual void abandon() = 0;
  virtual void shut_down() = 0;
  // To poll for, and for what (POLLIN, POLLOUT).
  virtual int descriptor() const = 0;
  virtual short events() const = 0;

  bool is_broken() const { return broken_.load(std::memory_order_acquire); }
  bool owes_answers() const { return owed_ > 0; }
  // After kComplete, until the next begin():
  const FrameHeader& header() const { return header_; }
  virtual const char* payload() const = 0;

  // From a connected, proven socket; takes ownership. `tls` may be null.
  static std::unique_ptr<RowConnection> over_socket(int descriptor, std::unique_ptr<TlsStream> tls = nullptr);
  static std::unique_ptr<RowConnection> over_slot(std::shared_ptr<SharedSlots> slots, size_t slot);

 protected:
  std::atomic<bool> broken_{false};
  FrameHeader header_{};
  uint64_t id_ = 0;
  size_t owed_ = 0;  // answers to abandoned requests
};

}  // namespace hotrow
