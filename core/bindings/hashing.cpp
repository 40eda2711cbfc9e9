#include <stdexcept>

#include "bindings/bindings.h"
#include "hash/hash.h"

namespace hotrow::bindings {
namespace {

void require_same(size_t a, size_t b, const char* what) {
  if (a != b) throw std::invalid_argument(what);
}

// Arrow's layout of a string column: bytes, and n + 1 offsets into them.
template <class Offset>
void hash_strings(Vector<const uint8_t> data, Vector<const Offset> offsets, uint64_t seed, Vector<int64_t> out) {
  require_same(offsets.size(), out.size() + 1, "hash_strings: offsets must be one longer than out");
  const Offset* begin = offsets.data();
  for (size_t i = 0; i < out.size(); ++i)
    if (begin[i] < 0 || begin[i] > begin[i + 1] || static_cast<size_t>(begin[i + 1]) > data.size())
      throw std::invalid_argument("hash_strings: offsets do not fit the data");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < out.size(); ++i)
    out.data()[i] = static_cast<int64_t>(hash_bytes(data.data() + begin[i], begin[i + 1] - begin[i], seed));
}

}  // namespace

void bind_hashing(nb::module_& m) {
  m.def(
      "hash_bytes",
      [](nb::bytes data, uint64_t seed) { return static_cast<int64_t>(hash_bytes(data.c_str(), data.size(), seed)); },
      nb::arg("data"), nb::arg("seed") = 0, "XXH64 of the bytes, as a signed 64-bit key.");
  m.def("hash_strings", &hash_strings<int32_t>, nb::arg("data").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("seed"), nb::arg("out").noconvert());
  m.def("hash_strings", &hash_strings<int64_t>, nb::arg("data").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("seed"), nb::arg("out").noconvert(),
        "Writes the XXH64 of each string of an Arrow column (bytes and offsets) to out.");
  m.def(
      "hash_ints",
      [](Vector<const int64_t> values, uint64_t seed, Vector<int64_t> out) {
        require_same(values.size(), out.size(), "hash_ints: values and out differ in length");
        nb::gil_scoped_release release;
        for (size_t i = 0; i < out.size(); ++i)
          out.data()[i] = static_cast<int64_t>(hash_int(static_cast<uint64_t>(values.data()[i]), seed));
      },
      nb::arg("values").noconvert(), nb::arg("seed"), nb::arg("out").noconvert(),
      "A seeded bijection of the 64-bit integers.");
  m.def(
      "cross",
      [](Vector<const int64_t> a, Vector<const int64_t> b, Vector<int64_t> out) {
        require_same(a.size(), out.size(), "cross: a and out differ in length");
        require_same(b.size(), out.size(), "cross: b and out differ in length");
        nb::gil_scoped_release release;
        for (size_t i = 0; i < out.size(); ++i)
          out.data()[i] =
              static_cast<int64_t>(cross(static_cast<uint64_t>(a.data()[i]), static_cast<uint64_t>(b.data()[i])));
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("out").noconvert(),
      "Combines two keys into one. Not symmetric: cross(a, b) != cross(b, a).");
  m.def(
      "shards",
      [](Vector<const int64_t> keys, Vector<int32_t> out) {
        require_same(keys.size(), out.size(), "shards: keys and out differ in length");
        nb::gil_scoped_release release;
        for (size_t i = 0; i < out.size(); ++i)
          out.data()[i] = static_cast<int32_t>(shard_of(hash_key(keys.data()[i])));
      },
      nb::arg("keys").noconvert(), nb::arg("out").noconvert(), "Writes each key's shard, 0 to 1,023, to out.");
}

}  // namespace hotrow::bindings
