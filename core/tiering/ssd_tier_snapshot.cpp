// Snapshots: rows that were dirty when the snapshot began are appended to the log while training goes on.
#include <algorithm>

#include "table/table.h"
#include "tiering/ssd_tier.h"

namespace hotrow {

void SsdTier::capture_slot(uint32_t slot, bool changes) {
  const RecordAddress place = append(slot, !changes);
  snapshot_->set.set(place);
  ++snapshot_->written;
  if (!changes) slot_state_.set_place(slot, place);
  slot_state_.set_epoch(slot, changes ? epoch_ : kClean);
}

void SsdTier::begin_snapshot() {
  snapshot_ = Snapshot{log_->begin_snapshot(), epoch_, 0, table_.slots_, 0};
  epoch_ = 3 - epoch_;
}

bool SsdTier::capture(uint32_t slots) {
  const uint64_t end = std::min<uint64_t>(snapshot_->end, snapshot_->cursor + slots);
  for (; snapshot_->cursor < end; ++snapshot_->cursor) {
    const auto slot = static_cast<uint32_t>(snapshot_->cursor);
    if (evicts_ && !active_[slot / kSlabSlots]) continue;
    if (needs_capture(slot) && table_.view_.headers[slot / 4].stamp[slot % 4] != 0) capture_slot(slot, false);
  }
  return snapshot_->cursor < snapshot_->end;
}

void SsdTier::end_snapshot(bool abandoned) {
  if (!snapshot_) return;
  if (abandoned)
    for (uint64_t slot = 0; slot < table_.slots_; ++slot) {
      if (evicts_ && !active_[slot / kSlabSlots]) continue;
      if (needs_capture(static_cast<uint32_t>(slot))) slot_state_.set_epoch(static_cast<uint32_t>(slot), epoch_);
    }
  snapshot_.reset();
  log_->end_snapshot();
}

}  // namespace hotrow
