// The table of attention kernels, compiled once per instruction set (attention_kernels.h). As in
// kernels/simd_kernels.cpp nothing here may emit a shared inline function.
#include "attention/attention_kernels.h"

#include "attention/simd_backward.h"
#include "attention/simd_forward.h"

#define HOTROW_CONCAT(a, b) a##b
#define HOTROW_NAME(a, b) HOTROW_CONCAT(a, b)
#define HOTROW_TEXT(x) #x
#define HOTROW_STRING(x) HOTROW_TEXT(x)

namespace hotrow {

extern const AttentionKernels HOTROW_NAME(kAttention_, HOTROW_SIMD_LEVEL);
const AttentionKernels HOTROW_NAME(kAttention_, HOTROW_SIMD_LEVEL) = {
    HOTROW_STRING(HOTROW_SIMD_LEVEL), kTileQueries, attention_scratch, forward_part, backward_part,
};

}  // namespace hotrow
