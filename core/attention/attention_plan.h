// How the work of one call of attention is split into tasks: by sizes alone, so that results never depend on threads.
//
// A part is a range of one user's queries. Small users share a task, large users are split. Tasks are ordered from the
// most expensive to the cheapest, so that threads finish at about the same time.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/attention_kernels.h"

namespace hotrow {

struct PlannedPart {
  AttentionPart part;
  size_t partial;  // 0: the first of its user; else which of the buffers for partial sums it uses, plus 1
};

struct AttentionTask {
  size_t first, last;  // parts
  size_t cost;         // pairs of queries and keys
  size_t longest;      // keys or queries of a user, whichever are more
  size_t head_begin, head_end;
  size_t group;  // tasks of the same users and other heads share it
};

struct AttentionPlan {
  std::vector<PlannedPart> parts;
  std::vector<AttentionTask> tasks;
  std::vector<size_t> partials;  // the part of each buffer for partial sums
  size_t groups = 0;
  size_t queries = 0, keys = 0;  // sums of the lengths
  size_t longest_queries = 0, longest_keys = 0;
};

// Splits users with more than `most_pairs` pairs and more than a sixteenth of all pairs, so that the buffers for
// partial sums stay few. Throws std::invalid_argument if the lengths do not fit the rows.
AttentionPlan plan_attention(const AttentionInputs& inputs, size_t most_pairs, size_t tile);

}  // namespace hotrow
