#include "exchange/shared_memory_exchange.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

namespace hotrow {
namespace {

constexpr size_t kPage = 4096, kLine = 64;
constexpr int kSpins = 200;
constexpr long kLivenessCheckNanoseconds = 50'000'000;

size_t up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(errno));
}

void wake(const uint32_t& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);  // an error means that no process waits
}

// Sleeps while the word is `seen`, at most for the liveness interval.
void sleep_while(const uint32_t& word, uint32_t seen) {
  const timespec moment{0, kLivenessCheckNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &moment, nullptr, 0);
}

// Whether a process runs, and when it was started.
struct ProcessStatus {
  bool runs = false;
  unsigned long long started = 0;
};

ProcessStatus process_status(int64_t process) {
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(process));
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t size = read(file, text, sizeof(text) - 1);
  ::close(file);
  if (size <= 0) return {};
  text[size] = 0;
  const char* behind = std::strrchr(text, ')');  // a process name may contain any character
  char state = 'X';
  ProcessStatus status;
  if (!behind ||
      std::sscanf(behind + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &state, &status.started) != 2)
    return {};
  status.runs = state != 'Z' && state != 'X';
  return status;
}

}  // namespace

// The first page of a segment. Words that processes wait for have a cache line each.
struct SharedMemoryExchange::Control {
  uint64_t token, bytes;  // of the whole segment
  struct Area {
    uint64_t offset, bytes;
  } areas[kDepth];
  alignas(kLine) uint32_t posted;
  alignas(kLine) uint32_t taken;
  alignas(kLine) uint32_t closed;
};

struct SharedMemoryExchange::Segment {
  int descriptor = -1;
  int64_t process = 0;
  unsigned long long started = 0;
  Control* control =
      nullptr;           // never remapped: other threads wait for its words, and close() may be called at any time
  char* data = nullptr;  // the whole segment, as large as it was when mapped
  size_t mapped = 0;

  ~Segment() {
    if (data) munmap(data, mapped);
    if (control) munmap(control, kPage);
    if (descriptor >= 0) ::close(descriptor);
  }
  void open_control() { control = static_cast<Control*>(map(kPage)); }
  void open_data(size_t bytes) {
    void* memory = map(bytes);
    if (data) munmap(data, mapped);
    data = static_cast<char*>(memory);
    mapped = bytes;
  }

 private:
  void* map(size_t bytes) const {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes");
    return memory;
  }
};

SharedMemoryExchange::SharedMemoryExchange(size_t rank, size_t world, double timeout)
    : rank_(rank), world_(world), timeout_(timeout) {
  static_assert(sizeof(Control) <= kPage);
  if (rank >= world) throw std::invalid_argument("SharedMemoryExchange: rank must be below world");
  for (size_t r = 0; r < world; ++r) segments_.push_back(std::make_unique<Segment>());
  Segment& own = *segments_[rank];
  own.descriptor = static_cast<int>(syscall(SYS_memfd_create, "hotrow-exchange", MFD_CLOEXEC));
  if (own.descriptor < 0) throw_errno("cannot make a segment");
  if (ftruncate(own.descriptor, kPage) != 0) throw_errno("cannot make a segment");
  own.open_control();
  own.process = getpid();
  std::random_device random;
  own.control->token = uint64_t{random()} << 32 | random();
  own.control->bytes = kPage;
}

SharedMemoryExchange::~SharedMemoryExchange() { close(); }

SegmentAddress SharedMemoryExchange::address() const {
  const Segment& own = *segments_[rank_];
  return {own.process, own.descriptor, own.control->token};
}

void SharedMemoryExchange::connect(const std::vector<SegmentAddress>& peers) {
  if (peers.size() != world_) throw std::invalid_argument("SharedMemoryExchange: give one address per process");
  for (size_t r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    Segment& other = *segments_[r];
    const auto& [process, descriptor, token] = peers[r];
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    other.descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (other.descriptor < 0) throw_errno("cannot open " + path);
    const ProcessStatus status = process_status(process);  // an unobservable process would later be considered dead
    if (!status.runs)
      throw std::runtime_error("shared memory: process " + std::to_string(process) +
                               " is not running, or this user may not see it");
    other.process = process;
    other.started = status.started;
    other.open_control();
    if (other.control->token != token)
      throw std::runtime_error("shared memory: " + path + " is not the segment of this address");
  }
}

// The own area of an exchange, with `bytes` bytes. Requires: every peer has taken its previous message.
char* SharedMemoryExchange::reserve_area(uint32_t number, size_t bytes) {
  Segment& own = *segments_[rank_];
  Control::Area area = own.control->areas[number % kDepth];
  if (area.bytes < bytes) {
    if (area.bytes)  // no peer reads it any more; release its pages
      fallocate(own.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(area.offset),
                static_cast<off_t>(area.bytes));
    const size_t more = up_to(bytes + bytes / 4, kPage), begin = own.control->bytes;
    if (ftruncate(own.descriptor, static_cast<off_t>(begin + more)) != 0)
      throw_errno("cannot take " + std::to_string(more) + " bytes more");
    own.open_data(begin + more);
    own.control->bytes = begin + more;
    area = {begin, more};
    own.control->areas[number % kDepth] = area;
  }
  return own.data + area.offset;
}

// A message: a table with the offset and size of each process's part, then the parts.
uint32_t SharedMemoryExchange::begin(const char* send, const std::vector<size_t>& to, bool broadcast, char* out,
                                     const std::vector<size_t>& from, bool own) {
  if (to.size() != (broadcast ? 1 : world_) || from.size() != world_)
    throw std::invalid_argument("SharedMemoryExchange: give one size per process");
  const uint32_t number = started_exchanges_ + 1;
  while (static_cast<int32_t>(number - completed_exchanges_) > static_cast<int32_t>(kDepth)) complete_next();
  ++posts_;
  for (size_t r = 0; r < world_ && posts_ > kDepth; ++r)
    if (r != rank_) wait_until(r, segments_[r]->control->taken, number - kDepth);

  const size_t table = up_to(2 * world_ * sizeof(uint64_t), kLine);
  size_t total = 0, out_at = 0;
  for (size_t r = 0; r < to.size(); ++r) total += broadcast || r != rank_ ? up_to(to[r], kLine) : 0;
  for (size_t r = 0; r < rank_; ++r) out_at += from[r];
  char* message = reserve_area(number, table + total);
  auto* places = reinterpret_cast<uint64_t*>(message);
  size_t send_at = 0, at = 0;
  for (size_t r = 0; r < world_; ++r) {
    const size_t bytes = broadcast ? to[0] : to[r];
    places[2 * r] = at;
    places[2 * r + 1] = bytes;
    if (r == rank_) {
      if (bytes != from[r])
        throw std::invalid_argument("SharedMemoryExchange: a process must receive from itself what it sends itself");
      if (bytes && own && out + out_at != send + send_at) std::memcpy(out + out_at, send + send_at, bytes);
    }
    if (bytes && (broadcast ? r == 0 : r != rank_)) std::memcpy(message + table + at, send + send_at, bytes);
    if (!broadcast) {
      send_at += bytes;
      at += r == rank_ ? 0 : up_to(bytes, kLine);
    }
  }
  pending_.push_back({out, from});
  started_exchanges_ = number;
  Control& control = *segments_[rank_]->control;
  std::atomic_ref(control.posted).store(number, std::memory_order_release);
  wake(control.posted);
  return number;
}

void SharedMemoryExchange::wait(uint32_t number) {
  if (static_cast<int32_t>(number - started_exchanges_) > 0)
    throw std::invalid_argument("SharedMemoryExchange: no exchange with this number was begun");
  while (static_cast<int32_t>(number - completed_exchanges_) > 0) complete_next();
}

void SharedMemoryExchange::complete_next() {
  const uint32_t number = completed_exchanges_ + 1;
  const Pending& pending = pending_.front();
  const size_t table = up_to(2 * world_ * sizeof(uint64_t), kLine);
  char* out = pending.out;
  for (size_t r = 0; r < world_; out += pending.from[r++]) {
    if (r == rank_) continue;
    Segment& other = *segments_[r];
    wait_until(r, other.control->posted, number);
    const Control::Area area = other.control->areas[number % kDepth];
    if (area.offset + area.bytes > other.mapped) other.open_data(area.offset + area.bytes);
    const char* message = other.data + area.offset;
    const auto* places = reinterpret_cast<const uint64_t*>(message);
    const uint64_t at = places[2 * rank_], bytes = places[2 * rank_ + 1];
    if (bytes != pending.from[r])
      throw std::runtime_error("shared memory: rank " + std::to_string(r) + " sent " + std::to_string(bytes) +
                               " bytes and " + std::to_string(pending.from[r]) + " were expected");
    if (bytes) std::memcpy(out, message + table + at, bytes);
  }
  pending_.pop_front();
  completed_exchanges_ = number;
  Control& control = *segments_[rank_]->control;
  std::atomic_ref(control.taken).store(number, std::memory_order_release);
  wake(control.taken);
}

void SharedMemoryExchange::wait_until(size_t rank, const uint32_t& word, uint32_t number) {
  const std::atomic_ref<uint32_t> now(const_cast<uint32_t&>(word));
  auto there = [&] { return static_cast<int32_t>(now.load(std::memory_order_acquire) - number) >= 0; };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (there()) return;
#if defined(__SSE2__)
    __builtin_ia32_pause();
#endif
  }
  const Segment& other = *segments_[rank];
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const uint32_t seen = now.load(std::memory_order_acquire);
    if (there()) return;
    const auto began = std::chrono::steady_clock::now();
    sleep_while(word, seen);
    if (there()) return;
    const auto woke = std::chrono::steady_clock::now();
    if (std::atomic_ref(const_cast<uint32_t&>(other.control->closed)).load(std::memory_order_acquire))
      throw std::runtime_error("shared memory: rank " + std::to_string(rank) + " has left");
    if (woke - began < std::chrono::nanoseconds(kLivenessCheckNanoseconds))
      continue;  // woken by a signal or for another exchange
    const ProcessStatus status = process_status(other.process);
    if (!status.runs || status.started != other.started)
      throw std::runtime_error("shared memory: rank " + std::to_string(rank) + " (process " +
                               std::to_string(other.process) + ") is gone");
    if (std::chrono::duration<double>(woke - start).count() > timeout_)
      throw std::runtime_error("shared memory: timed out after " + std::to_string(static_cast<int>(timeout_)) +
                               " s waiting for rank " + std::to_string(rank));
  }
}

void SharedMemoryExchange::close() {
  Control& control = *segments_[rank_]->control;
  std::atomic_ref(control.closed).store(1, std::memory_order_release);
  wake(control.posted);
  wake(control.taken);
}

}  // namespace hotrow
