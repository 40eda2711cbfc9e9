// Bindings of device/row_staging.h and device/miss_lists.h. The Python callers (src/hotrow/tiers/host/store.py and
// row_staging.py, src/hotrow/tiers/hbm) have checked every address passed here.
#include <stdexcept>

#include "bindings/bindings.h"
#include "bindings/table_ranges.h"
#include "device/miss_lists.h"
#include "plan/plan.h"

namespace hotrow::bindings {
void bind_row_staging(nb::module_& m, nb::class_<Table>& table, nb::class_<Plan>& plan) {
  m.def(
      "lookup_rows",
      [](const TableRangeTuples& tuples, Address keys, size_t begin, size_t end, Address slots, Address steps,
         Address counts, Address out, size_t stride) {
        const auto parts = table_ranges(tuples);
        nb::gil_scoped_release release;
        const RowLookup lookup{parts, at<const int64_t>(keys), at<uint32_t>(slots), at<uint32_t>(steps),
                               at<uint32_t>(counts)};
        return lookup_rows(lookup, {begin, end, at<float>(out)}, stride);
      },
      "Writes slots, steps and counts of keys in DRAM, and with `out` their rows; returns how many are missing.");
  m.def("gather_rows",
        [](const TableRangeTuples& tuples, Address slots, size_t begin, size_t end, Address out, size_t stride) {
          const auto parts = table_ranges(tuples);
          nb::gil_scoped_release release;
          lookup_rows({parts, nullptr, at<uint32_t>(slots), nullptr, nullptr}, {begin, end, at<float>(out)}, stride);
        });
  m.def("write_back_rows", [](const TableRangeTuples& tuples, Address slots, Address steps, Address counts,
                              uint32_t last_clean_step, size_t begin, size_t end, Address rows, size_t stride) {
    const auto parts = table_ranges(tuples);
    nb::gil_scoped_release release;
    write_back_rows(parts, at<const uint32_t>(slots), at<const uint32_t>(steps), at<const uint32_t>(counts),
                    last_clean_step, begin, end, at<const float>(rows), stride);
  });

  m.def(
      "read_misses",
      [](const std::vector<std::shared_ptr<Table>>& tables, Address columns, Address counts, Address keys,
         Address examples, size_t capacity, int policy, size_t width, Address out, Address places, Address flat,
         Address late, Address starts) {
        MissLists lists{{},
                        at<const int32_t>(columns),
                        at<const int32_t>(counts),
                        at<const int64_t>(keys),
                        at<const int32_t>(examples),
                        capacity,
                        at<const int32_t>(starts)};
        for (const auto& table : tables) lists.tables.push_back(table.get());
        nb::gil_scoped_release release;
        return read_misses(lists, static_cast<ColdReadPolicy>(policy), width, at<float>(out), at<int64_t>(places),
                           at<int64_t>(flat), at<uint32_t>(late));
      },
      nb::arg("tables"), nb::arg("columns"), nb::arg("counts"), nb::arg("keys"), nb::arg("examples"),
      nb::arg("capacity"), nb::arg("policy"), nb::arg("width"), nb::arg("out"), nb::arg("places"), nb::arg("flat"),
      nb::arg("late"), nb::arg("starts") = 0,
      "Reads the rows that a GPU cache lacks, and writes their positions and keys; returns how many.");

  plan.def(
          "slot_metadata",
          [](const Plan& self, Address slots, Address steps, Address counts) {
            self.slot_metadata(at<uint32_t>(slots), at<uint32_t>(steps), at<uint32_t>(counts));
          },
          nb::arg("slots"), nb::arg("steps"), nb::arg("counts"), nb::call_guard<nb::gil_scoped_release>())
      .def("pin_for_device", &Plan::pin_for_device, nb::call_guard<nb::gil_scoped_release>())
      .def("commit_device_update", &Plan::commit_device_update, nb::call_guard<nb::gil_scoped_release>());

  table
      .def(
          "unpin_from_device",
          [](Table& self, Vector<const int32_t> slots) {
            nb::gil_scoped_release release;
            self.unpin_from_device(reinterpret_cast<const uint32_t*>(slots.data()), slots.size());
          },
          nb::arg("slots").noconvert())
      .def(
          "alive",
          [](const Table& self, Vector<const int32_t> slots, Vector<bool> out) {
            require(out.size() == slots.size(), "alive: arrays differ in length");
            nb::gil_scoped_release release;
            self.slots_occupied(reinterpret_cast<const uint32_t*>(slots.data()), slots.size(), out.data());
          },
          nb::arg("slots").noconvert(), nb::arg("out").noconvert())
      .def("row_memory",
           [](const Table& self) {
             const auto memory = self.row_memory();
             return std::make_tuple(reinterpret_cast<Address>(memory.data), memory.bytes, memory.row_bytes);
           })
      .def_prop_ro("count_stream", &Table::count_stream)
      .def_prop_ro("rounding_stream", &Table::rounding_stream);
}

}  // namespace hotrow::bindings
