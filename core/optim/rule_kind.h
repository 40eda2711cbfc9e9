// The update rules by number, shared with src/hotrow/optim.py.
#pragma once

namespace hotrow {

enum class RuleKind : int { kSgd = 0, kAdagrad, kRowWiseAdagrad, kAdam, kAdamW, kFtrl, kCount };

}  // namespace hotrow
