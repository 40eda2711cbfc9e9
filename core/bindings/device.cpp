// Rows on their way to a GPU and back, for src/hotrow/tiers/host.py: arrays in, arrays out, all of one length.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings/bindings.h"
#include "rows/plan.h"

namespace hotrow::bindings {
namespace {

using Address = uintptr_t;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

template <class T>
const uint32_t* words(const T& array) {
  return reinterpret_cast<const uint32_t*>(array.data());
}

}  // namespace

void bind_device(nb::class_<Table>& table, nb::class_<Plan>& plan) {
  plan.def(
          "route_unique",
          [](Plan& self, const std::vector<std::tuple<std::shared_ptr<Table>, Address, Address, size_t>>& tuples) {
            std::vector<JobInput> jobs;
            for (const auto& [table, keys, seen, count] : tuples)
              jobs.push_back({table,
                              {{reinterpret_cast<const int64_t*>(keys), count, nullptr, count, nullptr, Pooling::kNone,
                                reinterpret_cast<const uint32_t*>(seen)}}});
            nb::gil_scoped_release release;
            self.route(jobs);
          },
          nb::arg("jobs"), "Tables with their unique keys and how often each was seen (int32), by address.")
      .def(
          "places",
          [](const Plan& self, Vector<int32_t> slots, Vector<int32_t> steps, Vector<int32_t> counts) {
            require(slots.size() == self.ids() && steps.size() == slots.size() && counts.size() == slots.size(),
                    "places: give arrays of one element per key");
            nb::gil_scoped_release release;
            self.places(reinterpret_cast<uint32_t*>(slots.data()), reinterpret_cast<uint32_t*>(steps.data()),
                        reinterpret_cast<uint32_t*>(counts.data()));
          },
          nb::arg("slots").noconvert(), nb::arg("steps").noconvert(), nb::arg("counts").noconvert())
      .def(
          "copy_rows",
          [](const Plan& self, Address out, size_t stride) { self.copy_rows(reinterpret_cast<float*>(out), stride); },
          nb::arg("out"), nb::arg("stride"), nb::call_guard<nb::gil_scoped_release>())
      .def("hold", &Plan::hold, nb::call_guard<nb::gil_scoped_release>())
      .def("commit", &Plan::commit, nb::call_guard<nb::gil_scoped_release>());

  table
      .def(
          "lower",
          [](Table& self, Vector<const int32_t> slots, Address rows, size_t stride, Vector<const int32_t> steps,
             Vector<const int32_t> counts, uint32_t clean) {
            require(steps.size() == slots.size() && counts.size() == slots.size(), "lower: arrays differ in length");
            nb::gil_scoped_release release;
            self.lower(words(slots), slots.size(), reinterpret_cast<const float*>(rows), stride, words(steps),
                       words(counts), clean);
          },
          nb::arg("slots").noconvert(), nb::arg("rows"), nb::arg("stride"), nb::arg("steps").noconvert(),
          nb::arg("counts").noconvert(), nb::arg("clean"))
      .def(
          "unhold",
          [](Table& self, Vector<const int32_t> slots) {
            nb::gil_scoped_release release;
            self.unhold(words(slots), slots.size());
          },
          nb::arg("slots").noconvert())
      .def(
          "alive",
          [](const Table& self, Vector<const int32_t> slots, Vector<bool> out) {
            require(out.size() == slots.size(), "alive: arrays differ in length");
            nb::gil_scoped_release release;
            self.alive(words(slots), slots.size(), out.data());
          },
          nb::arg("slots").noconvert(), nb::arg("out").noconvert())
      .def("row_memory",
           [](const Table& self) {
             const auto memory = self.row_memory();
             return std::make_tuple(reinterpret_cast<Address>(memory.data), memory.bytes, memory.row_bytes);
           })
      .def_prop_ro("count_stream", &Table::count_stream);
}

}  // namespace hotrow::bindings
