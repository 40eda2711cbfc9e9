// Jagged attention over torch's tensors, by address. The Python caller has checked shapes and dtypes.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention/attention_kernels.h"
#include "attention/jagged_attention.h"
#include "bindings/bindings.h"

namespace hotrow::bindings {
namespace {

using RowsTuple = std::tuple<Address, size_t, size_t>;  // data, stride of a row and of a head

HeadRows rows(const RowsTuple& tuple) {
  return {at<const float>(std::get<0>(tuple)), std::get<1>(tuple), std::get<2>(tuple)};
}

// q, k, v, own_k, own_v; q_lengths, k_lengths, visible, q_times, k_times, position_bias, time_bias; users, queries,
// keys, heads, dim, width, positions, times. The callers give the same order (attention_cpu.py).
AttentionInputs inputs(const std::vector<RowsTuple>& tensors, const std::vector<Address>& addresses,
                       const std::vector<size_t>& sizes, bool softmax, bool causal, float scale, float divisor) {
  require(tensors.size() == 5 && addresses.size() == 7 && sizes.size() == 8, "attention: wrong number of arguments");
  AttentionInputs in;
  in.q = rows(tensors[0]), in.k = rows(tensors[1]), in.v = rows(tensors[2]);
  in.own_k = rows(tensors[3]), in.own_v = rows(tensors[4]);
  in.q_lengths = at<const int64_t>(addresses[0]), in.k_lengths = at<const int64_t>(addresses[1]);
  in.visible = at<const int64_t>(addresses[2]);
  in.q_times = at<const int64_t>(addresses[3]), in.k_times = at<const int64_t>(addresses[4]);
  in.position_bias = at<const float>(addresses[5]), in.time_bias = at<const float>(addresses[6]);
  in.users = sizes[0], in.queries = sizes[1], in.keys = sizes[2], in.heads = sizes[3];
  in.dim = sizes[4], in.width = sizes[5], in.positions = sizes[6], in.times = sizes[7];
  in.softmax = softmax, in.causal = causal, in.scale = scale, in.divisor = divisor;
  return in;
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention_instruction_set", [] { return attention_kernels().name; });
  m.def("attention_forward", [](const std::vector<RowsTuple>& tensors, const std::vector<Address>& addresses,
                                const std::vector<size_t>& sizes, bool softmax, bool causal, float scale, float divisor,
                                Address out, Address log_sums) {
    const AttentionInputs in = inputs(tensors, addresses, sizes, softmax, causal, scale, divisor);
    nb::gil_scoped_release release;
    attention_forward(in, at<float>(out), at<float>(log_sums));
  });
  m.def("attention_backward",
        [](const std::vector<RowsTuple>& tensors, const std::vector<Address>& addresses,
           const std::vector<size_t>& sizes, bool softmax, bool causal, float scale, float divisor,
           const RowsTuple& gradient, const RowsTuple& out, Address log_sums, const std::vector<Address>& to) {
          require(to.size() == 7, "attention: wrong number of gradients");
          const AttentionInputs in = inputs(tensors, addresses, sizes, softmax, causal, scale, divisor);
          const AttentionGradients gradients{at<float>(to[0]), at<float>(to[1]), at<float>(to[2]), at<float>(to[3]),
                                             at<float>(to[4]), at<float>(to[5]), at<float>(to[6])};
          nb::gil_scoped_release release;
          attention_backward(in, rows(gradient), rows(out), at<const float>(log_sums), gradients);
        });
}

}  // namespace hotrow::bindings
