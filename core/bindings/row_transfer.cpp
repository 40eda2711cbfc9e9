// Bindings of device/row_transfer.h. The Python caller (src/hotrow/tiers/hbm/row_transfer.py) owns the memory at every
// address passed here.
#include "device/row_transfer.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings.h"
#include "bindings/table_ranges.h"

namespace hotrow::bindings {

using device::RowTransfer;
using device::ScatterArgs;
using device::Upload;
using device::WriteBack;
using device::ZeroCopyArgs;

namespace {

using Launches = std::vector<std::pair<Address, Address>>;  // captured graph, cell

template <class Cell>
std::vector<std::pair<device::Handle, Cell*>> launches_of(const Launches& addresses) {
  std::vector<std::pair<device::Handle, Cell*>> launches;
  for (const auto& [graph, cell] : addresses) launches.emplace_back(at<void>(graph), at<Cell>(cell));
  return launches;
}

}  // namespace

void bind_row_transfer(nb::module_& m) {
  nb::class_<WriteBack>(m, "WriteBack")
      .def(
          "store_rows",
          [](WriteBack& self, const TableRangeTuples& tuples, Address slots, Address steps, Address counts,
             uint32_t last_clean_step) {
            const auto parts = table_ranges(tuples);
            nb::gil_scoped_release release;
            self.store_rows(parts, at<const uint32_t>(slots), at<const uint32_t>(steps), at<const uint32_t>(counts),
                            last_clean_step);
          },
          nb::arg("parts"), nb::arg("slots"), nb::arg("steps"), nb::arg("counts"), nb::arg("last_clean_step"));

  nb::class_<RowTransfer>(m, "RowTransfer")
      .def(
          "__init__",
          [](RowTransfer* self, Address up, Address copies, Address down, size_t width, size_t capacity,
             size_t chunk_rows, const Launches& zero_copy_launches, const Launches& scatter_launches) {
            new (self)
                RowTransfer(at<void>(up), at<void>(copies), at<void>(down), width, capacity, chunk_rows,
                            launches_of<ZeroCopyArgs>(zero_copy_launches), launches_of<ScatterArgs>(scatter_launches));
          },
          nb::arg("up"), nb::arg("copies"), nb::arg("down"), nb::arg("width"), nb::arg("capacity"),
          nb::arg("chunk_rows"), nb::arg("zero_copy_launches"), nb::arg("scatter_launches"))
      .def(
          "upload",
          [](RowTransfer& self, const TableRangeTuples& tuples, size_t count, Address keys, Address slots,
             Address steps, Address counts, size_t zero_copy_count, Address device_slots, Address device_tables,
             Address staged, Address device_staging, bool stop_at_first_miss, bool scatter, size_t parts) {
            const Upload upload{table_ranges(tuples),
                                count,
                                at<const int64_t>(keys),
                                at<uint32_t>(slots),
                                at<uint32_t>(steps),
                                at<uint32_t>(counts),
                                zero_copy_count,
                                static_cast<int64_t>(device_slots),
                                static_cast<int64_t>(device_tables),
                                at<float>(staged),
                                device_staging,
                                stop_at_first_miss,
                                scatter};
            nb::gil_scoped_release release;
            return self.upload(upload, parts);
          },
          nb::arg("tables"), nb::arg("count"), nb::arg("keys"), nb::arg("slots"), nb::arg("steps"), nb::arg("counts"),
          nb::arg("zero_copy_count"), nb::arg("device_slots"), nb::arg("device_tables"), nb::arg("staged"),
          nb::arg("device_staging"), nb::arg("stop_at_first_miss"), nb::arg("scatter"), nb::arg("parts"),
          "Returns how many rows are missing.")
      .def(
          "begin_write_back",
          [](RowTransfer& self, Address stream, Address device_rows, size_t rows, Address staged) {
            return self.begin_write_back(at<void>(stream), device_rows, rows, at<float>(staged));
          },
          nb::arg("stream"), nb::arg("device_rows"), nb::arg("rows"), nb::arg("staged"),
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hotrow::bindings
