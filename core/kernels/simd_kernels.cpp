// The table of SIMD kernels, compiled once per instruction set (row_kernels.h). Nothing here may emit a shared inline
// function: the linker could pick the AVX2 copy for the baseline code. So helpers are in the unnamed namespace or
// always inlined.
//
// All loops over random rows work in small groups: prefetch the next group, then use this one. One DRAM miss takes
// about 100 ns; eight to sixteen in flight hide it.
#include "kernels/row_kernels.h"
#include "kernels/simd_lookup.h"
#include "kernels/simd_pairwise_dots.h"
#include "kernels/simd_pool.h"
#include "kernels/simd_update.h"

#define HOTROW_CONCAT(a, b) a##b
#define HOTROW_NAME(a, b) HOTROW_CONCAT(a, b)
#define HOTROW_TEXT(x) #x
#define HOTROW_STRING(x) HOTROW_TEXT(x)

namespace hotrow {

extern const Kernels HOTROW_NAME(kKernels_, HOTROW_SIMD_LEVEL);
const Kernels HOTROW_NAME(kKernels_, HOTROW_SIMD_LEVEL) = {
    HOTROW_STRING(HOTROW_SIMD_LEVEL),
    find,
    read,
    decode,
    pool,
    all_finite,
    {update<Sgd>, update<Adagrad>, update<RowWiseAdagrad>, update<Adam>, update<AdamW>, update<Ftrl>},
    sum_gradients,
    pairwise_dots,
};

}  // namespace hotrow
