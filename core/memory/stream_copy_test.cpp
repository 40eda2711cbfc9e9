#include "memory/stream_copy.h"

#include <algorithm>
#include <vector>

#include "testing/test.h"

namespace hotrow {
namespace {

TEST(stream_copy_of_any_size_from_and_to_anywhere) {
  std::vector<char> from(1024), to(1024);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 37 + 11);
  for (size_t begin : {0, 1, 4, 31, 63, 64, 65})
    for (size_t source : {0, 3, 16})
      for (size_t bytes : {0, 1, 4, 63, 64, 65, 127, 128, 132, 200, 516}) {
        std::fill(to.begin(), to.end(), char{5});
        stream_copy(to.data() + begin, from.data() + source, bytes);
        finish_stream_copies();
        for (size_t i = 0; i < to.size(); ++i)
          CHECK_EQ(to[i], i >= begin && i < begin + bytes ? from[source + i - begin] : char{5});
      }
}

}  // namespace
}  // namespace hotrow
