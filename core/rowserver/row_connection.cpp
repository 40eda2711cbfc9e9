#include "rowserver/row_connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hotrow {
namespace {

constexpr size_t kHeader = sizeof(FrameHeader), kSkip = 256 << 10;

class SocketConnection final : public RowConnection {
 public:
  SocketConnection(int descriptor, std::unique_ptr<TlsStream> tls) : socket_(descriptor), tls_(std::move(tls)) {
    const int one = 1, flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0) broken_ = true;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }

  void begin(const Request& request) override {
    out_ = {
        kRowsMagic, request.kind, RowError::kNone, ++id_, request.head_bytes + request.keys_bytes, request.publication,
        0};
    request_ = request;
    sent_ = 0;
    waits_ = true;
    send();
  }

  Progress advance() override {
    while (!is_broken()) {
      if (sends()) send();
      if (!read_header()) break;
      if (header_.id == id_ && waits_) {
        if (!read_payload()) break;
        in_header_ = 0;
        waits_ = false;
        return Progress::kComplete;
      }
      if (!skip_payload()) break;
      in_header_ = 0;
      if (owed_ == 0) return fail();  // an answer that was not asked for
      --owed_;
      if (!waits_) break;
    }
    return is_broken() ? Progress::kBroken : Progress::kWaits;
  }

  void abandon() override {
    if (!waits_) return;
    if (sends()) {  // the rest of the request would be in the way of the next one
      broken_ = true;
    } else {
      ++owed_;
    }
    waits_ = false;
  }

  void shut_down() override {
    broken_ = true;
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

  int descriptor() const override { return socket_.get(); }
  short events() const override { return static_cast<short>(sends() ? POLLIN | POLLOUT : POLLIN); }
  const char* payload() const override { return in_.data(); }

 private:
  bool sends() const { return waits_ && sent_ < kHeader + out_.bytes; }
  Progress fail() {
    broken_ = true;
    return Progress::kBroken;
  }

  void send() {
    while (sends() && !is_broken()) {
      iovec parts[3];
      int count = 0;
      size_t skip = sent_;
      const auto add = [&](const void* data, size_t bytes) {
        const size_t over = std::min(skip, bytes);
        skip -= over;
        if (bytes > over) parts[count++] = {const_cast<char*>(static_cast<const char*>(data)) + over, bytes - over};
      };
      add(&out_, kHeader);
      add(request_.head, request_.head_bytes);
      add(request_.keys, request_.keys_bytes);
      const ssize_t sent = send_to(socket_.get(), tls_.get(), parts, count);
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
      if (sent <= 0) broken_ = true;
      if (sent > 0) sent_ += static_cast<size_t>(sent);
    }
  }

  // Returns how many bytes arrived, 0 for none now.
  size_t receive(char* out, size_t bytes) {
    const ssize_t got = receive_from(socket_.get(), tls_.get(), out, bytes);
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) broken_ = true;
    return 0;
  }

  bool read_header() {
    while (in_header_ < kHeader) {
      const size_t got = receive(reinterpret_cast<char*>(&header_) + in_header_, kHeader - in_header_);
      if (got == 0) return false;
      in_header_ += got;
      if (in_header_ < kHeader) continue;
      if (header_.magic != kRowsMagic || header_.bytes > kMostFrame) {
        broken_ = true;
        return false;
      }
      received_ = 0;
    }
    return true;
  }

  bool read_payload() {
    if (received_ == 0) in_.resize(header_.bytes + 8);
    while (received_ < header_.bytes) {
      const size_t got = receive(in_.data() + received_, header_.bytes - received_);
      if (got == 0) return false;
      received_ += got;
    }
    return true;
  }

  bool skip_payload() {
    while (received_ < header_.bytes) {
      const size_t got = receive(skipped_.resize(kSkip), std::min(kSkip, header_.bytes - received_));
      if (got == 0) return false;
      received_ += got;
    }
    return true;
  }

  Descriptor socket_;
  const std::unique_ptr<TlsStream> tls_;
  FrameHeader out_{};
  Request request_{};
  size_t sent_ = 0, in_header_ = 0, received_ = 0;
  bool waits_ = false;
  Buffer<char> in_, skipped_;
};

class SlotConnection final : public RowConnection {
 public:
  SlotConnection(std::shared_ptr<SharedSlots> slots, size_t slot) : slots_(std::move(slots)), slot_(slot) {}

  void begin(const Request& request) override {
    const FrameHeader header{
        kRowsMagic, request.kind, RowError::kNone, ++id_, request.head_bytes + request.keys_bytes, request.publication,
        0};
    waits_ = true;
    if (kHeader + header.bytes > SharedSlots::kRequestBytes) {
      broken_ = true;
    } else if (free_slot()) {
      write(request, header);
    } else {
      pending_ = request;  // the slot still has an abandoned request
      has_pending_ = true;
    }
  }

  Progress advance() override {
    SharedSlots::clear(slots_->answer_event(slot_));
    if (is_broken()) return Progress::kBroken;  // read after the event was reset, or shut_down()'s could be lost
    if (has_pending_) {
      if (!free_slot()) return Progress::kWaits;
      has_pending_ = false;
      write(pending_, {kRowsMagic, pending_.kind, RowError::kNone, id_, pending_.head_bytes + pending_.keys_bytes,
                       pending_.publication, 0});
      return Progress::kWaits;
    }
    if (!waits_ || slots_->state(slot_).load(std::memory_order_acquire) != SharedSlots::kAnswered)
      return Progress::kWaits;
    std::memcpy(&header_, slots_->answer(slot_), kHeader);
    if (header_.magic != kRowsMagic || header_.id != id_ || header_.bytes > SharedSlots::kAnswerBytes - kHeader) {
      broken_ = true;
      return Progress::kBroken;
    }
    waits_ = false;
    return Progress::kComplete;
  }

  void abandon() override {
    if (waits_ && !has_pending_) owed_ = 1;
    waits_ = has_pending_ = false;
  }
  void shut_down() override {
    broken_ = true;
    slots_->wake(slot_);
  }
  int descriptor() const override { return slots_->answer_event(slot_); }
  short events() const override { return POLLIN; }
  const char* payload() const override { return slots_->answer(slot_) + kHeader; }

 private:
  // Whether a request may be written: the slot is free, or has an answer that was read or abandoned.
  bool free_slot() {
    const uint32_t state = slots_->state(slot_).load(std::memory_order_acquire);
    if (state == SharedSlots::kSubmitted || state == SharedSlots::kWorking) return false;
    owed_ = 0;
    return true;
  }

  void write(const Request& request, const FrameHeader& header) {
    char* out = slots_->request(slot_);
    std::memcpy(out, &header, kHeader);
    if (request.head_bytes) std::memcpy(out + kHeader, request.head, request.head_bytes);
    if (request.keys_bytes) std::memcpy(out + kHeader + request.head_bytes, request.keys, request.keys_bytes);
    slots_->submit(slot_);
  }

  const std::shared_ptr<SharedSlots> slots_;
  const size_t slot_;
  Request pending_{};
  bool waits_ = false, has_pending_ = false;
};

}  // namespace

std::unique_ptr<RowConnection> RowConnection::over_socket(int descriptor, std::unique_ptr<TlsStream> tls) {
  return std::make_unique<SocketConnection>(descriptor, std::move(tls));
}

std::unique_ptr<RowConnection> RowConnection::over_slot(std::shared_ptr<SharedSlots> slots, size_t slot) {
  return std::make_unique<SlotConnection>(std::move(slots), slot);
}

}  // namespace hotrow
