// Rows between DRAM and a GPU, for src/hotrow/table/way.py, which owns what is behind the addresses.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings.h"
#include "bindings/parts.h"
#include "device/way.h"

namespace hotrow::bindings {

using device::LandCell;
using device::Leaving;
using device::PullCell;
using device::Rising;
using device::Way;

namespace {

using Launches = std::vector<std::pair<Address, Address>>;  // captured graph, cell

template <class Cell>
std::vector<std::pair<device::Handle, Cell*>> launches_of(const Launches& addresses) {
  std::vector<std::pair<device::Handle, Cell*>> launches;
  for (const auto& [graph, cell] : addresses) launches.emplace_back(at<void>(graph), at<Cell>(cell));
  return launches;
}

}  // namespace

void bind_ways(nb::module_& m) {
  nb::class_<Leaving>(m, "Leaving")
      .def(
          "put",
          [](Leaving& self, const Parts& tuples, Address slots, Address steps, Address counts, uint32_t clean) {
            const auto parts = parts_of(tuples);
            nb::gil_scoped_release release;
            self.put(parts, at<const uint32_t>(slots), at<const uint32_t>(steps), at<const uint32_t>(counts), clean);
          },
          nb::arg("parts"), nb::arg("slots"), nb::arg("steps"), nb::arg("counts"), nb::arg("clean"));

  nb::class_<Way>(m, "Way")
      .def(
          "__init__",
          [](Way* self, Address up, Address copies, Address down, size_t width, size_t room, size_t piece,
             const Launches& pulls, const Launches& lands) {
            new (self) Way(at<void>(up), at<void>(copies), at<void>(down), width, room, piece,
                           launches_of<PullCell>(pulls), launches_of<LandCell>(lands));
          },
          nb::arg("up"), nb::arg("copies"), nb::arg("down"), nb::arg("width"), nb::arg("room"), nb::arg("piece"),
          nb::arg("pulls"), nb::arg("lands"))
      .def(
          "raise_rows",
          [](Way& self, const Parts& tuples, size_t count, Address keys, Address slots, Address steps, Address counts,
             size_t first, Address device_slots, Address device_tables, Address staged, Address incoming, bool all,
             bool land, size_t parts) {
            const Rising rising{parts_of(tuples),
                                count,
                                at<const int64_t>(keys),
                                at<uint32_t>(slots),
                                at<uint32_t>(steps),
                                at<uint32_t>(counts),
                                first,
                                static_cast<int64_t>(device_slots),
                                static_cast<int64_t>(device_tables),
                                at<float>(staged),
                                incoming,
                                all,
                                land};
            nb::gil_scoped_release release;
            return self.raise(rising, parts);
          },
          nb::arg("tables"), nb::arg("count"), nb::arg("keys"), nb::arg("slots"), nb::arg("steps"), nb::arg("counts"),
          nb::arg("first"), nb::arg("device_slots"), nb::arg("device_tables"), nb::arg("staged"), nb::arg("incoming"),
          nb::arg("all"), nb::arg("land"), nb::arg("parts"), "Returns how many rows are not there.")
      .def(
          "lower_rows",
          [](Way& self, Address stream, Address leaving, size_t rows, Address staged) {
            return self.lower(at<void>(stream), leaving, rows, at<float>(staged));
          },
          nb::arg("stream"), nb::arg("leaving"), nb::arg("rows"), nb::arg("staged"),
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hotrow::bindings
