// Bindings of device/graph_runner.h and device/reader_writer_gate.h. The Python callers
// (src/hotrow/tiers/hbm/serving_reader.py, src/hotrow/serve/execution/device_lane.py) own the memory at every address
// passed here.
#include "device/graph_runner.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace hotrow::bindings {
namespace {

using device::GraphRunner;
using device::MissBuffers;
using device::ReaderWriterGate;
using device::RunnerBuffers;

std::vector<const int64_t*> lists_of(const std::vector<Address>& addresses) {
  std::vector<const int64_t*> lists;
  lists.reserve(addresses.size());
  for (Address address : addresses) lists.push_back(at<const int64_t>(address));
  return lists;
}

}  // namespace

void bind_graph_runner(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<ReaderWriterGate>(m, "ReaderWriterGate")
      .def(nb::init<bool>(), nb::arg("device"))
      .def("add_lane", &ReaderWriterGate::add_lane)
      .def(
          "begin_read", [](ReaderWriterGate& self, Address stream) { self.begin_read(at<void>(stream)); }, unlocked)
      .def("end_read", [](ReaderWriterGate& self, int lane, Address stream) { self.end_read(lane, at<void>(stream)); })
      .def(
          "begin_write", [](ReaderWriterGate& self, Address stream) { self.begin_write(at<void>(stream)); }, unlocked)
      .def(
          "wait_for_writes", [](ReaderWriterGate& self, Address stream) { self.wait_for_writes(at<void>(stream)); },
          unlocked)
      .def("end_write", [](ReaderWriterGate& self, Address stream) { self.end_write(at<void>(stream)); });

  nb::class_<MissBuffers>(m, "MissBuffers")
      .def(
          "__init__",
          [](MissBuffers* self, std::vector<std::shared_ptr<Table>> tables, size_t capacity, Address columns,
             Address counts, Address keys, Address examples, Address rows, Address places, Address flat, Address count,
             Address starts, size_t width, Address late) {
            const MissLists lists{{},
                                  at<const int32_t>(columns),
                                  at<const int32_t>(counts),
                                  at<const int64_t>(keys),
                                  at<const int32_t>(examples),
                                  capacity,
                                  at<const int32_t>(starts)};
            new (self) MissBuffers{std::move(tables),  lists, at<float>(rows),   at<int64_t>(places), at<int64_t>(flat),
                                   at<int32_t>(count), width, at<uint32_t>(late)};
          },
          nb::arg("tables"), nb::arg("capacity"), nb::arg("columns"), nb::arg("counts"), nb::arg("keys"),
          nb::arg("examples"), nb::arg("rows"), nb::arg("places"), nb::arg("flat"), nb::arg("count"),
          nb::arg("starts") = 0, nb::arg("width") = 0, nb::arg("late") = 0);

  nb::class_<GraphRunner>(m, "GraphRunner")
      .def(
          "__init__",
          [](GraphRunner* self, std::shared_ptr<ReaderWriterGate> gate, int lane, Address stream, Address find,
             Address tower, size_t capacity, size_t features, size_t dense, size_t width, size_t tasks, Address keys,
             Address examples, Address dense_in, Address logits, Address late, std::vector<MissBuffers> missing) {
            const RunnerBuffers buffers{capacity,
                                        features,
                                        dense,
                                        width,
                                        tasks,
                                        at<int64_t>(keys),
                                        at<int32_t>(examples),
                                        at<float>(dense_in),
                                        at<const float>(logits),
                                        at<uint32_t>(late)};
            new (self) GraphRunner(std::move(gate), lane, at<void>(stream), at<void>(find), at<void>(tower), buffers,
                                   std::move(missing));
          },
          nb::arg("gate"), nb::arg("lane"), nb::arg("stream"), nb::arg("find"), nb::arg("tower"), nb::arg("capacity"),
          nb::arg("features"), nb::arg("dense"), nb::arg("width"), nb::arg("tasks"), nb::arg("keys"),
          nb::arg("examples"), nb::arg("dense_in"), nb::arg("logits"), nb::arg("late"), nb::arg("missing"))
      .def(
          "enqueue_lookup",
          [](GraphRunner& self, const std::vector<Address>& keys, size_t count, Address dense) {
            const auto lists = lists_of(keys);
            nb::gil_scoped_release release;
            self.enqueue_lookup(lists, count, at<const float>(dense));
          },
          nb::arg("keys"), nb::arg("count"), nb::arg("dense"))
      .def(
          "fill_misses_and_enqueue_tower",
          [](GraphRunner& self, int policy) {
            return self.fill_misses_and_enqueue_tower(static_cast<ColdReadPolicy>(policy));
          },
          unlocked, nb::arg("policy"), "Returns how many ids the HBM cache lacked.")
      .def(
          "copy_logits", [](GraphRunner& self, Address out) { self.copy_logits(at<float>(out)); }, unlocked,
          nb::arg("out"))
      .def(
          "run",
          [](GraphRunner& self, const std::vector<Address>& keys, size_t count, Address dense, int policy,
             Address out) {
            const auto lists = lists_of(keys);
            nb::gil_scoped_release release;
            self.enqueue_lookup(lists, count, at<const float>(dense));
            const size_t missing = self.fill_misses_and_enqueue_tower(static_cast<ColdReadPolicy>(policy));
            self.copy_logits(at<float>(out));
            return missing;
          },
          nb::arg("keys"), nb::arg("count"), nb::arg("dense"), nb::arg("policy"), nb::arg("out"),
          "Runs the three steps above in order. Returns how many ids the HBM cache lacked.");
}

}  // namespace hotrow::bindings
