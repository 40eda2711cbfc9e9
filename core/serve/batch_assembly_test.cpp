// Assembly of hostile bytes, under the sanitizers. tests/serve compares assembly with plain numpy.
#include "serve/batch_assembly.h"

#include <cstring>
#include <random>

#include "testing/test.h"

using namespace hotrow::serve;

namespace {

void put(std::vector<uint8_t>& out, const void* data, size_t bytes) {
  const size_t at = out.size();
  out.resize(at + bytes);
  std::memcpy(out.data() + at, data, bytes);
}

// Three rows: a feature with one id per row, a jagged one with weights, a shared one; two dense columns.
std::vector<uint8_t> a_frame() {
  std::vector<uint8_t> out;
  out.reserve(1024);
  RequestHead head{{0, 1, 0, 0, 7}, 1, 5, 3, 3, -1, 2, 0};
  put(out, &head, sizeof head);
  const FeatureHead heads[] = {{3, 0, 0, 0}, {4, 1, 1, 0}, {2, 2, 0, 0}};
  put(out, heads, sizeof heads);
  const int64_t one[] = {10, 11, 12}, jagged[] = {20, 21, 22, 23}, offsets[] = {0, 1, 1, 4}, shared[] = {30, 31};
  const float weights[] = {1, 2, 3, 4}, dense[] = {1, 2, 3, 4, 5, 6};
  put(out, one, sizeof one);
  put(out, jagged, sizeof jagged);
  put(out, offsets, sizeof offsets);
  put(out, weights, sizeof weights);
  put(out, shared, sizeof shared);
  put(out, dense, sizeof dense);
  const auto length = static_cast<uint32_t>(out.size());
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

constexpr BatchLayout kLayout{3, 2, 5, 1 << 20};

}  // namespace

TEST(joined_frames_have_their_rows_in_order) {
  const auto frame = a_frame();
  const RequestSlice pieces[] = {{frame.data(), frame.size(), 1, 2}, {frame.data(), frame.size(), 0, 1}};
  const AssembledBatch joined = assemble(pieces, kLayout);
  CHECK_EQ(joined.rows, 3u);
  CHECK(!joined.columns[0].jagged);
  CHECK_EQ(joined.values[0], 11);
  CHECK_EQ(joined.values[2], 10);
  CHECK(joined.columns[1].jagged && joined.columns[1].weighted);
  const int64_t* offsets = joined.offsets.get() + joined.columns[1].offsets;
  CHECK_EQ(offsets[1], 0);
  CHECK_EQ(offsets[2], 3);
  CHECK_EQ(offsets[3], 4);
  CHECK_EQ(joined.values[joined.columns[1].begin + 3], 20);
  CHECK_EQ(joined.weights[joined.columns[1].begin], 2.0f);
  CHECK_EQ(joined.columns[2].end - joined.columns[2].begin, 6u);
  CHECK_EQ(joined.dense[0], 3.0f);
}

TEST(piece_outside_of_its_request_is_an_error) {
  const auto frame = a_frame();
  for (auto [first, rows] : {std::pair{0u, 4u}, {3u, 1u}, {0u, 0u}, {~0u, 2u}, {1u, ~0u}}) {
    const RequestSlice piece{frame.data(), frame.size(), first, rows};
    CHECK_THROWS(FrameError, assemble({&piece, 1}, kLayout));
  }
}

TEST(every_cut_of_a_frame_is_an_error) {
  const auto frame = a_frame();
  for (size_t size = 0; size < frame.size(); ++size) {
    // A copy of exactly these bytes, so that the address sanitizer detects a read past them.
    std::vector<uint8_t> cut(frame.begin(), frame.begin() + static_cast<ptrdiff_t>(size));
    const auto length = static_cast<uint32_t>(size);
    if (size >= sizeof length) std::memcpy(cut.data(), &length, sizeof length);
    RequestView view;
    CHECK_THROWS(FrameError, view.parse(cut.data(), cut.size()));
  }
}

TEST(mutated_frames_are_joined_or_refused_and_never_read_outside) {
  std::mt19937 random(1);
  int joined = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    auto frame = a_frame();
    for (uint32_t i = 0; i <= random() % 3; ++i) {
      const size_t at = 4 + random() % (frame.size() - 4);
      frame[at] = random() % 4 ? static_cast<uint8_t>(random()) : (random() % 2 ? 0xff : 0);
    }
    RequestHead head;
    std::memcpy(&head, frame.data(), sizeof head);
    const RequestSlice piece{frame.data(), frame.size(), 0, head.rows};
    try {
      assemble({&piece, 1}, {head.features, head.dense, head.fingerprint, 1 << 16});
      ++joined;
    } catch (const FrameError&) {
      ++refused;
    }
  }
  CHECK(joined > 1000);
  CHECK(refused > 1000);
}

TEST(answers_outside_of_the_logits_are_an_error) {
  const float logits[] = {1, 2, 3};
  const AnswerPart part{1, 2, 2, 0};
  const AnswerCommon common{1, 0, 0, 0, false, 0};
  std::vector<uint8_t> out(answers_size({&part, 1}, common));
  CHECK_THROWS(FrameError, write_answers({&part, 1}, common, logits, 3, out.data()));
}
