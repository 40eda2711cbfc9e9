// A segment of shared memory in slots, each with room for one request and its answer: the channel between a row server
// and a client process on the same machine.
//
// The client leases a slot, writes a frame into its request area, sets the state to kSubmitted and signals the request
// eventfd. The server sets kWorking, writes the answer's frame into the answer area, sets kAnswered and signals the
// slot's answer eventfd. So no byte of a lookup passes a socket, and a waiting client polls a descriptor as it does for
// a socket. A segment belongs to one client: whatever it writes into the memory harms itself alone; the server checks a
// copy of what it uses for addressing. The eventfds' flags are common to both sides, so a client could make them block
// the server: it must have proven the token before it gets them.
//
// Threads: a slot belongs to one side at a time, by its state.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/descriptor.h"
#include "rowserver/row_protocol.h"

namespace hotrow {

class SharedSlots {
 public:
  static constexpr size_t kSlots = 16;
  static constexpr size_t kRequestBytes = size_t{1} << 20;
  static constexpr size_t kAnswerBytes = size_t{8} << 20;
  enum State : uint32_t { kFree = 0, kSubmitted = 1, kWorking = 2, kAnswered = 3 };

  // Makes a segment and its eventfds (the server's side).
  SharedSlots();
  // Opens one (the client's side) from the descriptors() of the other process. Takes ownership of them.
  explicit SharedSlots(const std::vector<int>& descriptors);
  ~SharedSlots();
  SharedSlots(const SharedSlots&) = delete;
  SharedSlots& operator=(const SharedSlots&) = delete;

  // The segment, the request eventfd, and the slots' answer eventfds.
  std::vector<int> descriptors() const;
  int request_event() const { return request_.get(); }
  int answer_event(size_t slot) const { return answers_[slot].get(); }

  std::atomic<uint32_t>& state(size_t slot) { return *reinterpret_cast<std::atomic<uint32_t>*>(data_ + slot * 64); }
  char* request(size_t slot) { return data_ + kPage + slot * kSlotBytes; }
  char* answer(size_t slot) { return request(slot) + kRequestBytes; }

  // Client: hands the frame in the slot's request area to the server.
  void submit(size_t slot);
  // Server: hands the frame in the slot's answer area to the client.
  void finish(size_t slot);
  // Client: wakes the thread that polls for the slot's answer.
  void wake(size_t slot);
  // Resets an eventfd. Returns whether it was signalled.
  static bool clear(int event);

 private:
  static constexpr size_t kPage = 4096, kSlotBytes = kRequestBytes + kAnswerBytes;
  static constexpr size_t kBytes = kPage + kSlots * kSlotBytes;
  void map();

  Descriptor memory_, request_;
  std::vector<Descriptor> answers_;
  char* data_ = nullptr;
};

}  // namespace hotrow
