// Bindings of plan/plan_by_owner.cpp, and of plans over keys that requesters have deduplicated. The Python callers
// (src/hotrow/tiers/host/plan.py and row_staging.py) have checked every address passed here.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/matrices.h"
#include "plan/plan.h"

namespace hotrow::bindings {
namespace {

using KeyArrays = std::tuple<Address, Address, size_t>;  // keys, occurrences, count

}  // namespace

void bind_plan_by_owner(nb::class_<Plan>& plan) {
  plan.def(
          "route_unique",
          [](Plan& self, const std::vector<std::tuple<std::shared_ptr<Table>, std::vector<KeyArrays>>>& tuples) {
            std::vector<JobInput> jobs;
            for (const auto& [table, requests] : tuples) {
              JobInput job{table, {}};
              for (const auto& [keys, occurrences, count] : requests)
                job.features.push_back({at<const int64_t>(keys), count, nullptr, count, nullptr, Pooling::kNone,
                                        at<const uint32_t>(occurrences)});
              jobs.push_back(std::move(job));
            }
            nb::gil_scoped_release release;
            self.route(jobs);
          },
          nb::arg("jobs"),
          "Routes tables with the unique keys of each requester and their occurrences (int32), by address.")
      .def(
          "partition_by_owner",
          [](Plan& self, Address owner_of, size_t world, Address counts) {
            self.partition_by_owner(at<const uint32_t>(owner_of), world, at<int64_t>(counts));
          },
          nb::arg("owner_of"), nb::arg("world"), nb::arg("counts"), nb::call_guard<nb::gil_scoped_release>(),
          "Orders the unique keys by owner; writes the number of keys per owner and table to counts[world, tables].")
      .def(
          "partitioned_keys",
          [](const Plan& self, Address keys, Address occurrences) {
            self.partitioned_keys(at<int64_t>(keys), at<uint32_t>(occurrences));
          },
          nb::arg("keys"), nb::arg("occurrences"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_received_rows", [](Plan& self, Address rows) { self.set_received_rows(at<const float>(rows)); },
          nb::arg("rows"), "Sets the rows of the partitioned keys. Their memory must stay valid until the next route.")
      .def(
          "sum_gradients",
          [](Plan& self, const std::vector<MatrixTuple>& gradients, const std::vector<MatrixTuple>& checked,
             Address out, Address present) {
            auto list = matrices(gradients), to_check = matrices(checked);
            Plan::SumResult summed;
            {
              nb::gil_scoped_release release;
              summed = self.sum_gradients(list, to_check, at<float>(out), at<uint8_t>(present));
            }
            return nb::make_tuple(summed.finite, summed.all_present);
          },
          nb::arg("gradients"), nb::arg("checked"), nb::arg("out"), nb::arg("present"),
          "Sums the gradients of each partitioned key; returns (all finite, every key had one).");
}

}  // namespace hotrow::bindings
