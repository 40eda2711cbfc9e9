// For tests and benchmarks only: eviction and compaction on request, faults of the io layer, and raw disk speed.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "bindings/bindings.h"
#include "hash/hash.h"
#include "io/reader.h"
#include "kernels/row_kernels.h"
#include "table/table.h"
#include "testing/faulty_files.h"
#include "tiering/compaction_thread.h"

namespace hotrow::bindings {
namespace {

// Random blocks of files, with the same reader that rows are read with.
double raw_reads(const std::vector<std::string>& paths, size_t count, uint32_t bytes, int depth, uint64_t seed) {
  std::vector<std::unique_ptr<File>> open;
  std::vector<uint64_t> first{0};  // block number at which each file begins
  for (const std::string& path : paths) {
    open.push_back(files().open(path, OpenMode::kReadDirect));
    first.push_back(first.back() + open.back()->size() / bytes);
  }
  if (first.back() == 0) throw std::invalid_argument("raw_reads: no file has a whole block");
  const size_t slots = static_cast<size_t>(depth) * 4;
  void* memory = std::aligned_alloc(kIoAlign, slots * bytes);
  if (!memory) throw std::bad_alloc();
  std::unique_ptr<void, void (*)(void*)> owner(memory, std::free);
  std::vector<ReadRequest> requests(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t block = hash_int(i, seed + 1) % first.back();
    const size_t file = std::upper_bound(first.begin(), first.end(), block) - first.begin() - 1;
    requests[i] = {open[file].get(), (block - first[file]) * bytes, static_cast<char*>(memory) + i % slots * bytes,
                   bytes};
  }
  auto reader = open_reader(depth);
  const auto start = std::chrono::steady_clock::now();
  reader->submit(requests.data(), count);
  reader->wait();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const ReadRequest& request : requests)
    if (request.error) throw IoError(request.error, "read", request.file->path());
  return seconds;
}

}  // namespace

void bind_testing(nb::module_& m, nb::class_<Table>& table) {
  m.def("simd", [] { return kernels().name; }, "The instruction set in use.");
  m.def(
      "set_compaction_rate", [](uint64_t rate) { CompactionThread::shared().set_rate(rate); },
      nb::arg("bytes_per_second"));

  table
      .def(
          "evict",
          [](Table& t, size_t rows) {
            nb::gil_scoped_release release;
            std::lock_guard lock(t.write_mutex());
            if (!t.tier() || !t.tier()->evicts()) return size_t{0};
            const size_t evicted = t.tier()->evict(rows);
            t.recharge_budget();
            return evicted;
          },
          nb::arg("rows"), "Evicts up to `rows` rows now; for benchmarks and tests.")
      .def(
          "compact",
          [](Table& t, size_t records) {
            nb::gil_scoped_release release;
            return t.tier() ? t.tier()->compact(records) : 0;
          },
          nb::arg("records") = 4096);

  m.def(
      "raw_reads",
      [](const std::vector<std::string>& paths, size_t count, uint32_t bytes, int depth, uint64_t seed) {
        nb::gil_scoped_release release;
        return raw_reads(paths, count, bytes, depth, seed);
      },
      nb::arg("paths"), nb::arg("count"), nb::arg("bytes") = 4096, nb::arg("depth") = 128, nb::arg("seed") = 0,
      "Returns the seconds for `count` random direct reads: the device's limit, for benchmarks.");

  // For tests: every call of the io layer can be made to fail.
  nb::class_<FaultyFiles>(m, "FaultyFiles")
      .def(
          "fail", [](FaultyFiles& f, uint64_t at, int code, bool repeat) { f.fail(at, code, repeat); }, nb::arg("at"),
          nb::arg("code"), nb::arg("repeat") = false)
      .def("heal", &FaultyFiles::heal)
      .def_prop_ro("calls", &FaultyFiles::calls)
      .def_prop_ro("last", &FaultyFiles::last);
  m.def("install_faults", [] {
    auto faulty = std::make_shared<FaultyFiles>(files());
    set_files(faulty);
    return faulty;
  });
  m.def("remove_faults", [] { set_files(nullptr); });
}

}  // namespace hotrow::bindings
