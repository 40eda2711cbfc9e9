// Reads by io_uring: a submission ring and a completion ring, both shared with the kernel.
//
// Every read holds one of `depth` slots from submit() until it is finished, over as many tries as it takes; the slot's
// number is the user_data of each try. A read is staged (its entry is in the submission ring) and then handed over with
// all other staged ones in one io_uring_enter. The kernel reads the submission ring only inside that call (there is no
// SQPOLL), and the completion ring has at least twice `depth` entries, so neither can overflow.
//
// Nothing here throws once the ring is open: an exception would let the caller free memory that the kernel still
// writes.
#include "io/reader.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif

// The flag and IORING_OP_READ were both added in Linux 5.6, so the flag's presence in the headers, and in the running
// kernel, implies the operation.
#if defined(IORING_FEAT_RW_CUR_POS) && defined(SYS_io_uring_setup) && defined(SYS_io_uring_enter)

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "io/descriptor.h"
#include "io/partial_transfer.h"

namespace hotrow {
namespace {

class RingMemory {
 public:
  RingMemory() = default;
  RingMemory(int ring, off_t which, size_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, which);
    if (data_ == MAP_FAILED) throw IoError(errno, "map", "io_uring");
  }
  ~RingMemory() {
    if (data_ != MAP_FAILED) ::munmap(data_, bytes_);
  }
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(RingMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  void* data_ = MAP_FAILED;
  size_t bytes_ = 0;
};

class UringReader : public Reader {
 public:
  // Throws IoError if the kernel refuses io_uring.
  explicit UringReader(int depth) : slots_(static_cast<size_t>(depth)) {
    io_uring_params params{};
    ring_ = Descriptor(static_cast<int>(::syscall(SYS_io_uring_setup, depth, &params)));
    if (ring_.get() < 0) throw IoError(errno, "set up", "io_uring");
    if (!(params.features & IORING_FEAT_RW_CUR_POS)) throw IoError(ENOSYS, "set up", "io_uring");
    // A sandbox may allow the first system call and not the second.
    if (call_enter(0) < 0) throw IoError(errno, "enter", "io_uring");

    const size_t submission_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completion_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_ = RingMemory(ring_.get(), IORING_OFF_SQ_RING, std::max(submission_bytes, completion_bytes));
    entries_memory_ = RingMemory(ring_.get(), IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
    entries_ = entries_memory_.at<io_uring_sqe>(0);
    entries_mask_ = *rings_.at<unsigned>(params.sq_off.ring_mask);
    shared_tail_ = rings_.at<unsigned>(params.sq_off.tail);
    tail_ = *shared_tail_;
    for (unsigned i = 0; i < params.sq_entries; ++i) rings_.at<unsigned>(params.sq_off.array)[i] = i;
    done_ = rings_.at<io_uring_cqe>(params.cq_off.cqes);
    done_mask_ = *rings_.at<unsigned>(params.cq_off.ring_mask);
    done_head_ = rings_.at<unsigned>(params.cq_off.head);
    done_tail_ = rings_.at<unsigned>(params.cq_off.tail);

    for (size_t i = slots_.size(); i > 0; --i) free_.push_back(static_cast<unsigned>(i - 1));
  }

  ~UringReader() override { wait(); }

  const char* name() const override { return "io_uring"; }
  int depth() const override { return static_cast<int>(slots_.size()); }

  void submit(ReadRequest* requests, size_t count) override {
    for (size_t i = 0; i < count; ++i) {
      requests[i].error = 0;
      if (requests[i].bytes == 0) continue;
      while (free_.empty()) {
        enter(1);
        reap();
      }
      const unsigned slot = free_.back();
      free_.pop_back();
      slots_[slot] = {&requests[i], 0};
      stage(slot);
    }
    while (staged_ > 0) {
      enter(0);
      reap();
    }
  }

  void wait() override {
    for (reap(); unfinished() > 0; reap()) enter(unfinished());
  }

 private:
  struct Slot {
    ReadRequest* request = nullptr;
    uint32_t done = 0;  // bytes, by earlier tries
  };

  unsigned unfinished() const { return static_cast<unsigned>(slots_.size() - free_.size()); }

  // The ring cannot be full: a slot is staged at most once, and there are no more slots than entries.
  void stage(unsigned slot) {
    const ReadRequest& request = *slots_[slot].request;
    const uint32_t done = slots_[slot].done;
    io_uring_sqe& entry = entries_[tail_ & entries_mask_];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_READ;
    entry.fd = request.file->descriptor();
    entry.off = request.offset + done;
    entry.addr = reinterpret_cast<uintptr_t>(request.into + done);
    entry.len = request.bytes - done;
    entry.user_data = slot;
    std::atomic_ref(*shared_tail_).store(++tail_, std::memory_order_release);
    ++staged_;
  }

  long call_enter(unsigned least) const {
    const unsigned flags = least > 0 ? IORING_ENTER_GETEVENTS : 0;
    return ::syscall(SYS_io_uring_enter, ring_.get(), staged_, least, flags, nullptr, 0);
  }

  // One attempt to submit the staged reads and to wait for `least` completions. The caller reaps and checks again,
  // because a signal or a lack of kernel memory may end the call early.
  void enter(unsigned least) {
    const long taken = call_enter(least);
    if (taken >= 0) {
      staged_ -= static_cast<unsigned>(taken);
    } else if (errno == EAGAIN || errno == EBUSY) {
      ::sched_yield();
    } else if (errno != EINTR) {
      take_back_staged(errno);
      ::sched_yield();  // reads that the kernel already has will still complete
    }
  }

  void take_back_staged(int error) {
    for (; staged_ > 0; --staged_) finish(static_cast<unsigned>(entries_[--tail_ & entries_mask_].user_data), error);
    std::atomic_ref(*shared_tail_).store(tail_, std::memory_order_release);
  }

  void reap() {
    unsigned head = *done_head_;  // the kernel only reads it
    const unsigned tail = std::atomic_ref(*done_tail_).load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe& result = done_[head & done_mask_];
      take(static_cast<unsigned>(result.user_data), result.res);
    }
    std::atomic_ref(*done_head_).store(head, std::memory_order_release);
  }

  // The result of one try: bytes, or -errno.
  void take(unsigned slot, int result) {
    auto& [request, done] = slots_[slot];
    // ECANCELED: the thread that submitted it has ended since, and another owns the reader now.
    const bool again = result == -EINTR || result == -EAGAIN || result == -EBUSY || result == -ECANCELED;
    if (again) return stage(slot);
    if (result < 0) return finish(slot, -result);
    const uint32_t reached = done + static_cast<uint32_t>(result);
    if (reached == request->bytes) return finish(slot, 0);
    if (result == 0 || ends_before(request->file->descriptor(), request->offset + reached)) return finish(slot, -1);
    done = static_cast<uint32_t>(retry_offset(request->offset, done, reached));
    stage(slot);
  }

  void finish(unsigned slot, int error) {
    slots_[slot].request->error = error;
    free_.push_back(slot);
  }

  Descriptor ring_;
  RingMemory rings_, entries_memory_;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;  // slots
  // Submission ring: this object writes the tail, the kernel the head.
  io_uring_sqe* entries_ = nullptr;
  unsigned entries_mask_ = 0;
  unsigned* shared_tail_ = nullptr;
  unsigned tail_ = 0;
  unsigned staged_ = 0;  // entries before the tail that the kernel has not taken yet
  // Completion ring: the kernel writes the tail, this object the head.
  io_uring_cqe* done_ = nullptr;
  unsigned done_mask_ = 0;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr;
};

}  // namespace

std::unique_ptr<Reader> open_uring_reader(int depth) {
  try {
    return std::make_unique<UringReader>(depth);
  } catch (const IoError&) {
    return nullptr;
  }
}

}  // namespace hotrow

#else

namespace hotrow {

std::unique_ptr<Reader> open_uring_reader(int) { return nullptr; }

}  // namespace hotrow

#endif
