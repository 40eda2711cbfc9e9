// Bindings of remote/redis_replies.h: keys are grouped and encoded, replies are decoded into the caller's arrays.
#include "remote/redis_replies.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <stdexcept>

#include "bindings/bindings.h"

namespace hotrow::bindings {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowBytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_redis_replies(nb::module_& m) {
  m.def(
      "group_by_partition",
      [](Vector<const int64_t> keys, int bits, Vector<uint32_t> order, Vector<uint32_t> bounds) {
        require(bits >= 0 && bits <= kMostPartitionBits, "group_by_partition: bits must be 0 to 14");
        require(order.size() == keys.size() && keys.size() <= std::numeric_limits<uint32_t>::max() &&
                    bounds.size() == (size_t{1} << bits) + 1,
                "group_by_partition: order must be [keys], bounds [2^bits + 1]");
        nb::gil_scoped_release release;
        group_by_partition(keys.data(), keys.size(), bits, order.data(), bounds.data());
      },
      nb::arg("keys").noconvert(), nb::arg("bits"), nb::arg("order").noconvert(), nb::arg("bounds").noconvert(),
      "Writes the indexes of the keys to order, by partition (the top bits of their hash). Partition p has bounds[p] "
      "to bounds[p + 1].");
  m.def(
      "encode_fields",
      [](Vector<const int64_t> keys, Vector<const uint32_t> order, Bytes out) {
        require(out.size() == order.size() * kFieldBytes, "encode_fields: out must have 14 bytes a key");
        nb::gil_scoped_release release;
        for (size_t i = 0; i < order.size(); ++i)
          if (order.data()[i] >= keys.size())
            throw std::invalid_argument("encode_fields: an index in order is not below the number of keys");
        encode_fields(keys.data(), order.data(), order.size(),
                      out.data() ? reinterpret_cast<char*>(out.data()) : nullptr);
      },
      nb::arg("keys").noconvert(), nb::arg("order").noconvert(), nb::arg("out").noconvert(),
      "Encodes the fields of an HMGET for keys[order].");

  nb::class_<RedisRowReplies>(m, "RowReplies")
      .def(
          "__init__",
          [](RedisRowReplies* self, RowBytes rows, Vector<int64_t> versions, Vector<uint8_t> found) {
            require(rows.shape(0) == versions.size() && versions.size() == found.size(),
                    "RowReplies: rows, versions and found differ in length");
            new (self)
                RedisRowReplies(rows.shape(1), reinterpret_cast<char*>(rows.data()), versions.data(), found.data());
          },
          nb::arg("rows").noconvert(), nb::arg("versions").noconvert(), nb::arg("found").noconvert(),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def(
          "expect",
          [](RedisRowReplies& self, Vector<const uint32_t> order, size_t begin, size_t end, size_t rows) {
            require(begin <= end && end <= order.size(), "expect: begin and end are outside of order");
            for (size_t i = begin; i < end; ++i)
              require(order.data()[i] < rows, "expect: an index in order is not below rows");
            self.expect(order.data() + begin, end - begin);
          },
          nb::arg("order").noconvert(), nb::arg("begin"), nb::arg("end"), nb::arg("rows"), nb::keep_alive<1, 2>(),
          "Expects the reply to a command for the rows order[begin:end], all below `rows`.")
      .def("expect_line", &RedisRowReplies::expect_line)
      .def(
          "feed",
          [](RedisRowReplies& self, Bytes buffer, size_t size) {
            require(size <= buffer.size(), "feed: size is larger than the buffer");
            nb::gil_scoped_release release;
            return self.feed(reinterpret_cast<char*>(buffer.data()), size);
          },
          nb::arg("buffer").noconvert(), nb::arg("size"),
          "Parses the buffer's first `size` bytes, moves an incomplete rest to the front, and returns its size.")
      .def_prop_ro("done", &RedisRowReplies::done)
      .def_prop_ro("expected", &RedisRowReplies::expected)
      .def_prop_ro("errors", [](const RedisRowReplies& self) {
        std::vector<std::tuple<size_t, nb::bytes>> errors;
        for (const auto& error : self.errors())
          errors.emplace_back(error.command, nb::bytes(error.text.data(), error.text.size()));
        return errors;
      });
}

}  // namespace hotrow::bindings
