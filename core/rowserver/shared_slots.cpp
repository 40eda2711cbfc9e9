#include "rowserver/shared_slots.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hotrow {
namespace {

[[noreturn]] void throw_errno(const char* what) {
  throw std::runtime_error(std::string("shared slots: ") + what + ": " + std::strerror(errno));
}

Descriptor make_event() {
  Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event.get() < 0) throw_errno("cannot make an eventfd");
  return event;
}

void signal_event(int event) {
  const uint64_t one = 1;
  if (::write(event, &one, sizeof(one)) < 0) return;  // the counter is full, so the event is already there
}

}  // namespace

SharedSlots::SharedSlots()
    : memory_(memfd_create("hotrow-rows", MFD_CLOEXEC | MFD_ALLOW_SEALING)), request_(make_event()) {
  if (memory_.get() < 0) throw_errno("cannot make shared memory");
  if (ftruncate(memory_.get(), kBytes) != 0) throw_errno("cannot size shared memory");
  // Sealed, so that a client cannot take pages away from under the server.
  if (fcntl(memory_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("cannot seal shared memory");
  for (size_t slot = 0; slot < kSlots; ++slot) answers_.push_back(make_event());
  map();
}

SharedSlots::SharedSlots(const std::vector<int>& descriptors) {
  std::vector<Descriptor> owned;
  for (const int descriptor : descriptors) owned.emplace_back(descriptor);
  if (owned.size() != 2 + kSlots) throw std::invalid_argument("shared slots: the server has another version");
  memory_ = std::move(owned[0]);
  request_ = std::move(owned[1]);
  for (size_t slot = 0; slot < kSlots; ++slot) answers_.push_back(std::move(owned[2 + slot]));
  struct stat status;
  if (fstat(memory_.get(), &status) != 0 || static_cast<size_t>(status.st_size) != kBytes)
    throw std::invalid_argument("shared slots: the server has another version");
  map();
}

SharedSlots::~SharedSlots() {
  if (data_) munmap(data_, kBytes);
}

void SharedSlots::map() {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
  if (memory == MAP_FAILED) throw_errno("cannot map shared memory");
  data_ = static_cast<char*>(memory);
}

std::vector<int> SharedSlots::descriptors() const {
  std::vector<int> all{memory_.get(), request_.get()};
  for (const Descriptor& answer : answers_) all.push_back(answer.get());
  return all;
}

void SharedSlots::submit(size_t slot) {
  state(slot).store(kSubmitted, std::memory_order_release);
  signal_event(request_.get());
}

void SharedSlots::finish(size_t slot) {
  state(slot).store(kAnswered, std::memory_order_release);
  signal_event(answers_[slot].get());
}

void SharedSlots::wake(size_t slot) { signal_event(answers_[slot].get()); }

bool SharedSlots::clear(int event) {
  uint64_t count;
  return ::read(event, &count, sizeof(count)) == sizeof(count);
}

}  // namespace hotrow
