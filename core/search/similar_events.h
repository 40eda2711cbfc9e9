// The k events of a history with the largest inner product with a candidate, for many candidates: the first stage of
// soft search (nn/histories/search.py). The choice is exact; most of the arithmetic is in 8 bits.
//
//   events of a user → 8 bits, a scale for each event → integer products with all candidates → a bound of each score
//   → the scores that the bounds leave open in 32 bits
//
// With c = s_c c8 + c', e = s_e e8 + e' (c8, e8 integers, c', e' what rounding lost) the score c.e differs from
// s_c s_e c8.e8 by at most |c'| |e| + |s_c c8| |e'|. So an event whose bound is below the k-th largest is out, one
// whose lower bound is above the (k+1)-th largest is in, and only the others need their float32 products.
// 500 candidates and 10,000 events of 64 floats are 320 million products:
// 64 an instruction in 8 bits (AVX-512 VNNI), 16 in 32.
//
// Events of equal score are chosen by age, oldest first. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

struct SimilarInputs {
  const float* candidates;  // [rows, dim], `candidate_stride` floats from one to the next
  const float* events;      // [events, dim], `event_stride` floats from one to the next
  size_t candidate_stride, event_stride;
  const int64_t* rows;     // [users]: user u has the next rows[u] candidates
  const int64_t* lengths;  // [users]: and the next lengths[u] events
  const int64_t* visible;  // [rows]: how many events a candidate sees; null: all
  size_t users, dim, keep;
};

// Whether this processor has the instructions, and no HOTROW_SIMD in the environment forbids them.
bool has_similar_events();

// index [rows, keep] and counts [rows], both zero before: the places of the chosen events, in order.
// Requires: has_similar_events(); all values finite; rows and lengths sum to at most what the arrays have.
void similar_events(const SimilarInputs& in, int64_t* index, int64_t* counts);

}  // namespace hotrow
