// Bindings of plan/plan_ahead.cpp and plan/in_flight_keys.h. The Python callers (src/hotrow/tiers/host/) have checked
// every address passed here.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "plan/in_flight_keys.h"
#include "plan/plan.h"

namespace hotrow::bindings {
namespace {

using BlockTuple = std::tuple<size_t, size_t>;  // rows, dim

std::vector<RowBlock> row_blocks(const std::vector<BlockTuple>& tuples) {
  std::vector<RowBlock> blocks;
  for (const auto& [rows, dim] : tuples) blocks.push_back({rows, dim});
  return blocks;
}

}  // namespace

void bind_plan_ahead(nb::module_& m, nb::class_<Plan>& plan) {
  nb::class_<InFlightKeys>(m, "InFlightKeys", "The last batch in flight that has each key.")
      .def(nb::init<>())
      .def_prop_ro("bytes", &InFlightKeys::bytes);
  plan.def("note_in_flight", &Plan::note_in_flight, nb::arg("keys"), nb::arg("batch"), nb::arg("done"),
           nb::call_guard<nb::gil_scoped_release>(), "Notes the batch's keys; batches up to `done` are not in flight.")
      .def(
          "copy_ahead",
          [](Plan& self, uint64_t done, uint32_t step, Address rows, Address masks) {
            nb::gil_scoped_release release;
            return self.copy_ahead(done, step, at<float>(rows), at<uint8_t>(masks));
          },
          nb::arg("done"), nb::arg("step"), nb::arg("rows"), nb::arg("masks"),
          "Copies rows in DRAM that no batch after `done` has; returns the number of floats by requester.")
      .def(
          "copy_changed",
          [](Plan& self, Address rows, Address masks) {
            nb::gil_scoped_release release;
            return self.copy_changed(at<float>(rows), at<uint8_t>(masks));
          },
          nb::arg("rows"), nb::arg("masks"),
          "Copies the rows that copy_ahead did not copy or that have changed since; returns floats by requester.");
  m.def(
      "masked_floats",
      [](Address mask, const std::vector<BlockTuple>& blocks) {
        return masked_floats(at<const uint8_t>(mask), row_blocks(blocks));
      },
      nb::arg("mask"), nb::arg("blocks"), "How many floats the rows (count, dim) are whose bit is set.");
  m.def(
      "expand_rows",
      [](Address mask, Address rows, const std::vector<BlockTuple>& blocks, Address out) {
        const auto list = row_blocks(blocks);
        nb::gil_scoped_release release;
        expand_rows(at<const uint8_t>(mask), at<const float>(rows), list, at<float>(out));
      },
      nb::arg("mask"), nb::arg("rows"), nb::arg("blocks"), nb::arg("out"),
      "Puts the rows whose bit is set into their places in `out`.");
}

}  // namespace hotrow::bindings
