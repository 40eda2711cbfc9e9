#include "memory/line_arena.h"

#include <algorithm>
#include <map>
#include <set>

#include "testing/random.h"
#include "testing/residency.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr size_t kReserve = size_t{64} << 20;

struct Block {
  char* data;
  size_t lines;
};

TEST(lines_are_zeroed_and_belong_to_one_block) {
  LineArena arena(kReserve);
  testing::Random random(1);
  char* end = nullptr;
  for (int i = 0; i < 1000; ++i) {
    const size_t lines = 1 + random.below(200);
    char* block = arena.allocate(lines);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block) % kLine, 0u);
    CHECK(block >= end);
    CHECK(std::all_of(block, block + lines * kLine, [](char c) { return c == 0; }));
    std::fill_n(block, lines * kLine, 7);
    end = block + lines * kLine;
  }
}

TEST(memory_follows_the_live_blocks_page_by_page) {
  LineArena arena(kReserve);
  testing::Random random(2);
  std::vector<Block> live;
  char* base = nullptr;
  char* end = nullptr;
  for (int i = 0; i < 3000; ++i) {
    if (live.empty() || random.below(100) < (i < 1500 ? 60 : 40)) {
      Block block{nullptr, 1 + random.below(300)};
      block.data = arena.allocate(block.lines);
      std::fill_n(block.data, block.lines * kLine, 7);
      if (!base) base = block.data;
      end = std::max(end, block.data + block.lines * kLine);
      live.push_back(block);
    } else {
      std::swap(live[random.below(live.size())], live.back());
      arena.release(live.back().data, live.back().lines);
      live.pop_back();
    }
    if (i % 50) continue;
    std::set<size_t> pages;
    for (const Block& block : live)
      for (size_t line = 0; line < block.lines; ++line) pages.insert((block.data + line * kLine - base) / kPage);
    CHECK(arena.resident() >= pages.size() * kPage);
    CHECK(arena.resident() <= (pages.size() + std::max<size_t>(64, pages.size() / 64)) * kPage);
    CHECK_EQ(arena.resident() / kPage, testing::resident_pages(base, end - base));
    arena.trim();
    CHECK_EQ(arena.resident(), pages.size() * kPage);
    CHECK_EQ(testing::resident_pages(base, end - base), pages.size());
  }
}

TEST(dead_lines_stay_readable_and_all_memory_goes_back) {
  LineArena arena(kReserve);
  std::vector<Block> blocks;
  for (size_t lines = 1; lines < 200; ++lines) blocks.push_back({arena.allocate(lines), lines});
  for (const Block& block : blocks) std::fill_n(block.data, block.lines * kLine, 7);
  for (const Block& block : blocks) arena.release(block.data, block.lines);
  arena.trim();
  CHECK_EQ(arena.resident(), 0u);
  for (const Block& block : blocks) CHECK(std::all_of(block.data, block.data + kLine, [](char c) { return c == 0; }));
}

}  // namespace
}  // namespace hotrow
