#include <cstdlib>
#include <string_view>

#include "kernels/row_kernels.h"

namespace hotrow {

extern const Kernels kKernels_baseline;
#ifdef HOTROW_HAS_AVX2
extern const Kernels kKernels_avx2;
#endif

const Kernels& kernels() {
  static const Kernels* chosen = []() -> const Kernels* {
    const char* wish = std::getenv("HOTROW_SIMD");
    bool plain = wish && std::string_view(wish) == "baseline";
#ifdef HOTROW_HAS_AVX2
    if (!plain && __builtin_cpu_supports("avx2")) return &kKernels_avx2;
#endif
    (void)plain;
    return &kKernels_baseline;
  }();
  return *chosen;
}

uint16_t add_count_slow(uint16_t code, uint64_t seen, uint64_t stream, int64_t key, uint32_t step) {
  return add_count(code, seen, [&] { return draw(stream, key, step, 0)[0]; });
}

}  // namespace hotrow
