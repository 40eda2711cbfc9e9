// Bindings of plan/plan.h. Calls take addresses that src/hotrow/tiers/host/plan.py has checked: wrapping 26 tensors a
// batch as arrays would cost more than the lookup.
#include "plan/plan.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/matrices.h"

namespace hotrow::bindings {
namespace {

using FeatureTuple =
    std::tuple<Address, size_t, Address, size_t, Address, int>;  // keys, count, offsets, bags, weights, pooling

void route(Plan& plan, const std::vector<std::tuple<std::shared_ptr<Table>, std::vector<FeatureTuple>>>& tuples) {
  std::vector<JobInput> jobs;
  for (const auto& [table, features] : tuples) {
    JobInput job{table, {}};
    for (const auto& [keys, count, offsets, bags, weights, pooling] : features)
      job.features.push_back({reinterpret_cast<const int64_t*>(keys), count, reinterpret_cast<const int64_t*>(offsets),
                              bags, reinterpret_cast<const float*>(weights), static_cast<Pooling>(pooling)});
    jobs.push_back(std::move(job));
  }
  nb::gil_scoped_release release;
  plan.route(jobs);
}

}  // namespace

nb::class_<Plan> bind_plan(nb::module_& m) {
  nb::exception<GradientNotFinite>(m, "GradientNotFinite", PyExc_ValueError);

  nb::class_<Plan> plan(m, "Plan");
  plan.def(nb::init<>())
      .def("route", &route, nb::arg("jobs"))
      .def("fetch", &Plan::fetch, nb::arg("step") = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "prefetch",
          [](Plan& plan) {
            const Plan::Prefetched prefetched = [&] {
              nb::gil_scoped_release release;
              return plan.prefetch();
            }();
            return std::make_tuple(prefetched.rows, prefetched.bytes, prefetched.out_of_slots);
          },
          "Reads rows from SSD into DRAM and protects them until fetch; returns (rows, bytes, whether slots ran out).")
      .def("release", &Plan::release, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read",
          [](Plan& plan, int policy) {
            require(policy >= 0 && policy <= 2, "read: the policy is 0 (wait), 1 (initial) or 2 (default)");
            nb::gil_scoped_release release;
            return plan.read(static_cast<ColdReadPolicy>(policy));
          },
          nb::arg("policy") = 0, "Copies the rows; returns how many ids were answered by the policy.")
      .def(
          "count_late",
          [](const Plan& plan, Vector<int32_t> counts) {
            nb::gil_scoped_release release;
            plan.count_late(reinterpret_cast<uint32_t*>(counts.data()), counts.size());
          },
          nb::arg("counts").noconvert(), "Writes the number of ids per example that were answered by the policy.")
      .def(
          "gather",
          [](Plan& plan, const std::vector<MatrixTuple>& outputs) {
            auto list = matrices(outputs);
            nb::gil_scoped_release release;
            plan.gather(list);
          },
          nb::arg("outputs"))
      .def(
          "update",
          [](Plan& plan, const std::vector<MatrixTuple>& gradients, const std::vector<MatrixTuple>& checked,
             std::vector<std::tuple<std::vector<float>, float, float>> updates, uint32_t step, float grad_scale,
             const std::vector<Address>& present) {
            std::vector<const uint8_t*> marks;
            for (Address address : present) marks.push_back(reinterpret_cast<const uint8_t*>(address));
            auto list = matrices(gradients), to_check = matrices(checked);
            UpdateOptions options{{}, step, grad_scale};
            for (auto& [coefficients, clip_value, clip_norm] : updates)
              options.jobs.push_back({std::move(coefficients), clip_value, clip_norm});
            nb::gil_scoped_release release;
            plan.update(list, to_check, options, marks);
          },
          nb::arg("gradients"), nb::arg("checked"), nb::arg("updates"), nb::arg("step"), nb::arg("grad_scale"),
          nb::arg("present") = std::vector<Address>())
      .def_prop_ro("ids", &Plan::ids)
      .def_prop_ro("prefetch_misses", &Plan::prefetch_misses)
      .def_prop_ro("unique", &Plan::unique)
      .def_prop_ro("bytes", &Plan::bytes);
  return plan;
}

}  // namespace hotrow::bindings
