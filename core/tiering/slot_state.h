// Per-slot state of a table that has a log: the address of the row's record on SSD, the epoch of its last change, its
// heat for the clock, its pin count, and the tag of the batch it is protected for. 10 bytes a slot, allocated only for
// such tables.
//
// A row is clean (its record has exactly its bytes) or dirty (it has no record address). A dirty row stores the epoch
// of its last change. There are two epochs, and a snapshot switches between them, so "changed before the snapshot and
// not yet captured" is one comparison.
#pragma once

#include <cstdint>
#include <cstring>

#include "log/log.h"
#include "memory/region.h"

namespace hotrow {

inline constexpr uint8_t kClean = 0;  // else epoch 1 or 2

class SlotState {
 public:
  explicit SlotState(size_t most_slots)
      : places_(most_slots * sizeof(RecordAddress), false), flags_(most_slots, false), pins_(most_slots, false) {}

  void commit(uint64_t slots) {
    places_.commit(slots * sizeof(RecordAddress));
    flags_.commit(slots);
    pins_.commit(slots);
  }
  void discard(uint64_t first, uint64_t slots) {
    places_.discard(first * sizeof(RecordAddress), slots * sizeof(RecordAddress));
    flags_.discard(first, slots);
    pins_.discard(first, slots);
  }
  size_t committed() const { return places_.committed() + flags_.committed() + pins_.committed(); }

  // Stored as address + 1, so that zeroed memory means kNoAddress.
  RecordAddress place(uint32_t slot) const { return reinterpret_cast<const RecordAddress*>(places_.data())[slot] - 1; }
  void set_place(uint32_t slot, RecordAddress place) {
    reinterpret_cast<RecordAddress*>(places_.data())[slot] = place + 1;
  }
  uint8_t& pins(uint32_t slot) { return reinterpret_cast<uint8_t*>(pins_.data())[slot]; }
  uint8_t epoch(uint32_t slot) const { return flags(slot) >> 2 & 3; }
  void set_epoch(uint32_t slot, uint8_t epoch) { set_flags(slot, (flags(slot) & ~(3 << 2)) | epoch << 2); }
  // The tag of the batch that the row is protected for; 0: none. See SsdTier::protect.
  uint8_t protect_tag(uint32_t slot) const { return flags(slot) >> 4; }
  void set_protect_tag(uint32_t slot, uint8_t tag) { set_flags(slot, (flags(slot) & 15) | tag << 4); }
  uint8_t heat(uint32_t slot) const { return flags(slot) & 3; }
  void warm(uint32_t slot) { set_flags(slot, flags(slot) + (heat(slot) < 3)); }
  void cool(uint32_t slot) { set_flags(slot, flags(slot) - (heat(slot) > 0)); }
  // warm() for readers, which have no lock. Never overwrites a concurrent writer's change. The increment may be lost,
  // or be applied to the next row of the slot.
  void warm_concurrently(uint32_t slot) const {
    auto* at = reinterpret_cast<uint8_t*>(flags_.data()) + slot;
    uint8_t now = __atomic_load_n(at, __ATOMIC_RELAXED);
    if ((now & 3) < 3)
      __atomic_compare_exchange_n(at, &now, static_cast<uint8_t>(now + 1), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void reset(uint32_t slot, uint8_t epoch, RecordAddress where) {
    set_flags(slot, epoch << 2);
    set_place(slot, where);
  }

  inline __attribute__((always_inline)) void prefetch(uint32_t slot) const {
    __builtin_prefetch(places_.data() + slot * sizeof(RecordAddress), 1);
    __builtin_prefetch(flags_.data() + slot, 1);
  }
  void set_all(uint64_t slots, uint8_t epoch) { std::memset(flags_.data(), epoch << 2, slots); }

  static constexpr size_t kBytes = sizeof(RecordAddress) + 2;

 private:
  uint8_t flags(uint32_t slot) const {
    return __atomic_load_n(reinterpret_cast<const uint8_t*>(flags_.data()) + slot, __ATOMIC_RELAXED);
  }
  void set_flags(uint32_t slot, int flags) {
    __atomic_store_n(reinterpret_cast<uint8_t*>(flags_.data()) + slot, static_cast<uint8_t>(flags), __ATOMIC_RELAXED);
  }

  Region places_, flags_, pins_;
};

}  // namespace hotrow
