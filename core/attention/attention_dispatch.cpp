#include <cstdlib>
#include <string_view>

#include "attention/attention_kernels.h"

namespace hotrow {

extern const AttentionKernels kAttention_baseline;
#ifdef HOTROW_HAS_AVX2
extern const AttentionKernels kAttention_avx2;
extern const AttentionKernels kAttention_avx512;
#endif

// HOTROW_SIMD=baseline or avx2 in the environment forces a plainer variant.
const AttentionKernels& attention_kernels() {
  static const AttentionKernels* chosen = []() -> const AttentionKernels* {
    const char* wish = std::getenv("HOTROW_SIMD");
    const std::string_view most = wish ? wish : "";
#ifdef HOTROW_HAS_AVX2
    if (most != "baseline") {
      if (most != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return &kAttention_avx512;
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAttention_avx2;
    }
#endif
    return &kAttention_baseline;
  }();
  return *chosen;
}

}  // namespace hotrow
