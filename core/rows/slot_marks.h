// What a slot carries when there is a log below it: where its row's copy on SSD is, whether the row has changed since,
// how warm it is, how many batches hold it, and which batch waits for it. 10 bytes a slot, in arrays of their own that
// exist only then.
//
// A row is clean (its place holds its very bytes) or dirty (no place). Dirty rows are marked with the epoch of their
// last change, of which two can be told apart: taking a snapshot turns the current epoch over, so "changed before the
// snapshot and not captured yet" is one comparison.
#pragma once

#include <cstdint>
#include <cstring>

#include "log/log.h"
#include "memory/region.h"

namespace hotrow {

inline constexpr uint8_t kClean = 0;  // else epoch 1 or 2

class SlotMarks {
 public:
  explicit SlotMarks(size_t most_slots)
      : places_(most_slots * sizeof(Place), false), flags_(most_slots, false), pins_(most_slots, false) {}

  void commit(uint64_t slots) {
    places_.commit(slots * sizeof(Place));
    flags_.commit(slots);
    pins_.commit(slots);
  }
  void discard(uint64_t first, uint64_t slots) {
    places_.discard(first * sizeof(Place), slots * sizeof(Place));
    flags_.discard(first, slots);
    pins_.discard(first, slots);
  }
  size_t committed() const { return places_.committed() + flags_.committed() + pins_.committed(); }
  size_t reserved_slots() const { return pins_.reserved(); }

  // Kept as place + 1, so that fresh memory says kNoPlace.
  Place place(uint32_t slot) const { return reinterpret_cast<const Place*>(places_.data())[slot] - 1; }
  void set_place(uint32_t slot, Place place) { reinterpret_cast<Place*>(places_.data())[slot] = place + 1; }
  uint8_t& pins(uint32_t slot) { return reinterpret_cast<uint8_t*>(pins_.data())[slot]; }
  uint8_t epoch(uint32_t slot) const { return flags(slot) >> 2 & 3; }
  void set_epoch(uint32_t slot, uint8_t epoch) { set_flags(slot, (flags(slot) & ~(3 << 2)) | epoch << 2); }
  // Which batch in flight waits for the row, 0 for none; see ColdTier::keep.
  uint8_t wait(uint32_t slot) const { return flags(slot) >> 4; }
  void set_wait(uint32_t slot, uint8_t tag) { set_flags(slot, (flags(slot) & 15) | tag << 4); }
  uint8_t heat(uint32_t slot) const { return flags(slot) & 3; }
  void warm(uint32_t slot) { set_flags(slot, flags(slot) + (heat(slot) < 3)); }
  void cool(uint32_t slot) { set_flags(slot, flags(slot) - (heat(slot) > 0)); }
  // The same for a reader, who has no lock. A writer's change that comes between is never undone; the warmth may be
  // lost, or go to the slot's next row.
  void warm_beside(uint32_t slot) const {
    auto* at = reinterpret_cast<uint8_t*>(flags_.data()) + slot;
    uint8_t now = __atomic_load_n(at, __ATOMIC_RELAXED);
    if ((now & 3) < 3)
      __atomic_compare_exchange_n(at, &now, static_cast<uint8_t>(now + 1), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void reset(uint32_t slot, uint8_t epoch, Place where) {
    set_flags(slot, epoch << 2);
    set_place(slot, where);
  }

  inline __attribute__((always_inline)) void prefetch(uint32_t slot) const {
    __builtin_prefetch(places_.data() + slot * sizeof(Place), 1);
    __builtin_prefetch(flags_.data() + slot, 1);
  }
  void set_all(uint64_t slots, uint8_t epoch) { std::memset(flags_.data(), epoch << 2, slots); }

  static constexpr size_t kBytes = sizeof(Place) + 2;

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
