#include "serve/dot_interaction.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/row_kernels.h"
#include "threads/thread_pool.h"

namespace hotrow::serve {

constexpr size_t kRowsPerTask = 128;  // 30 us

bool supports_dot_interaction(size_t count, size_t dim) {
  return count >= 2 && count <= kMaxInteractionVectors && dim >= 1 &&
         (count + 7) / 8 * 8 * dim <= kMaxInteractionFloats;
}

void dot_interaction(const std::vector<StridedVectors>& vectors, size_t dim, StridedVectors lead, size_t lead_width,
                     size_t rows, float* out) {
  const size_t count = vectors.size();
  if (!supports_dot_interaction(count, dim))
    throw std::invalid_argument("dot_interaction: too many vectors, or dim is too large");
  std::vector<const float*> data;
  std::vector<size_t> strides;
  for (const StridedVectors& vector : vectors) {
    data.push_back(vector.data);
    strides.push_back(vector.stride);
  }
  const size_t width = lead_width + count * (count - 1) / 2;
  const auto tasks = static_cast<int>((rows + kRowsPerTask - 1) / kRowsPerTask);
  ThreadPool::shared().run(tasks, [&](int task) {
    const size_t begin = static_cast<size_t>(task) * kRowsPerTask, end = std::min(rows, begin + kRowsPerTask);
    for (size_t row = begin; lead.data && row < end; ++row)
      std::memcpy(out + row * width, lead.data + row * lead.stride, lead_width * sizeof(float));
    kernels().pairwise_dots({data.data(), strides.data(), count, dim, begin, end, out + lead_width, width});
  });
}

}  // namespace hotrow::serve
