// What outlives a process, for Python: SSD tiers, snapshots, admission and expiry, and the io layer's faults for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "bindings/bindings.h"
#include "io/faults.h"
#include "log/manifest.h"
#include "log/segment_scan.h"
#include "rows/housekeeper.h"
#include "rows/table.h"

namespace hotrow::bindings {
namespace {

template <class T>
nb::ndarray<nb::numpy, T> array(std::vector<T> values, std::vector<size_t> shape) {
  auto* data = new std::vector<T>(std::move(values));
  nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(data->data(), shape.size(), shape.data(), owner);
}

std::vector<float> floats_of(const std::vector<char>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

// keys, counts, last steps, values [n, floats]
nb::tuple rows_tuple(const std::vector<RecordHead>& heads, std::vector<float> values) {
  std::vector<int64_t> keys, counts, steps;
  for (const RecordHead& head : heads) {
    keys.push_back(head.key);
    counts.push_back(static_cast<int64_t>(decode_count(head.count)));
    steps.push_back(step_of(head.stamp));
  }
  const size_t n = heads.size(), width = n ? values.size() / n : 0;
  return nb::make_tuple(array(std::move(keys), {n}), array(std::move(counts), {n}), array(std::move(steps), {n}),
                        array(std::move(values), {n, width}));
}

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

nb::dict tier_dict(const TierReport& report) {
  nb::dict d;
  d["hits"] = report.hits;
  d["misses"] = report.misses;
  d["arrivals"] = report.arrivals;
  d["prefetched"] = report.prefetched;
  d["evicted"] = report.evicted;
  d["evicted_dirty"] = report.evicted_dirty;
  d["cold_rows"] = report.cold_rows;
  d["cold_index_bytes"] = report.cold_index_bytes;
  d["marks_bytes"] = report.marks_bytes;
  d["compaction_errors"] = report.compaction_errors;
  d["segments"] = report.log.segments;
  d["records"] = report.log.records;
  d["live_records"] = report.log.live;
  d["disk_bytes"] = report.log.disk_bytes;
  d["live_bytes"] = report.log.live_bytes;
  d["bytes_written"] = report.log.bytes_written;
  d["bytes_read"] = report.log.bytes_read;
  d["blocks_read"] = report.log.blocks_read;
  d["rows_read"] = report.log.rows_read;
  d["compacted_bytes"] = report.log.compacted_bytes;
  d["log_ram_bytes"] = report.log.ram_bytes;
  return d;
}

}  // namespace

void bind_durable(nb::module_& m) {
  nb::exception<IoError>(m, "IoError", PyExc_OSError);
  nb::exception<CorruptFile>(m, "CorruptFile", PyExc_RuntimeError);

  nb::class_<FolderLock>(m, "FolderLock");
  m.def(
      "lock_folder",
      [](const std::string& folder) {
        files().make_folder(folder);
        return files().lock(folder);
      },
      nb::arg("folder"), "Holds a folder against other processes for as long as the result lives.");
  m.def(
      "set_compaction_rate", [](uint64_t rate) { Housekeeper::shared().set_rate(rate); }, nb::arg("bytes_per_second"));

  auto table = nb::borrow<nb::class_<Table>>(m.attr("Table"));
  table
      .def(
          "attach",
          [](Table& t, const std::string& folder, bool evicts, size_t buffer_bytes, uint64_t segment_bytes, int depth,
             nb::object, bool drops) {
            nb::gil_scoped_release release;
            LogOptions options{folder, t.options().name, static_cast<uint32_t>(t.width() * sizeof(float))};
            options.buffer_bytes = buffer_bytes;
            options.segment_bytes = segment_bytes;
            options.depth = depth;
            options.row_type = static_cast<uint32_t>(t.options().type);
            t.attach(std::make_unique<Log>(options), evicts, drops);
          },
          nb::arg("folder"), nb::arg("evicts"), nb::arg("buffer_bytes") = size_t{1} << 20,
          nb::arg("segment_bytes") = uint64_t{64} << 20, nb::arg("depth") = 128, nb::arg("lock") = nb::none(),
          nb::arg("drops") = false, nb::keep_alive<1, 7>(),
          "Put a log below the rows; with `evicts`, DRAM becomes a cache over it. `lock` is held as long as the table "
          "lives, which may be longer than whoever made it: a batch or a save may still use it.")
      .def_prop_ro("has_log", [](const Table& t) { return t.tier() != nullptr; })
      .def_prop_ro("evicts", [](const Table& t) { return t.tier() && t.tier()->evicts(); })
      .def("tier",
           [](const Table& t) {
             TierReport report;
             {
               nb::gil_scoped_release release;
               std::lock_guard lock(t.writer());
               if (t.tier()) report = t.tier()->report();
             }
             return tier_dict(report);
           })
      .def(
          "prefetch",
          [](Table& t, Vector<const int64_t> keys) {
            nb::gil_scoped_release release;
            return t.prefetch(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert(), "Bring rows up from SSD; returns how many came.")
      .def(
          "warm",
          [](Table& t, Vector<const int64_t> keys) {
            nb::gil_scoped_release release;
            t.warm(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert(), "Rows of these keys were used: they leave DRAM later.")
      .def(
          "scan_cold",
          [](const Table& t, uint32_t shard) {
            std::vector<RecordHead> heads;
            std::vector<float> rows;
            {
              nb::gil_scoped_release release;
              std::lock_guard lock(t.writer());
              t.scan_cold(shard, heads, rows);
            }
            return rows_tuple(heads, std::move(rows));
          },
          nb::arg("shard"))
      .def(
          "set_admission",
          [](Table& t, uint32_t after, double probability, size_t sketch_bytes) {
            t.set_admission({after, probability, sketch_bytes});
          },
          nb::arg("after"), nb::arg("probability"), nb::arg("sketch_bytes"))
      .def(
          "sweep",
          [](Table& t, uint32_t cutoff, uint32_t count_cutoff, uint64_t min_count, uint32_t norm_cutoff, float min_norm,
             uint64_t max_rows, uint64_t elsewhere) {
            nb::gil_scoped_release release;
            return t.sweep({cutoff, count_cutoff, norm_cutoff, min_count, min_norm, max_rows}, elsewhere);
          },
          nb::arg("cutoff") = 0, nb::arg("count_cutoff") = 0, nb::arg("min_count") = 0, nb::arg("norm_cutoff") = 0,
          nb::arg("min_norm") = 0.0f, nb::arg("max_rows") = 0, nb::arg("elsewhere") = 0)
      .def(
          "staying",
          [](Table& t, uint32_t cutoff, uint32_t count_cutoff, uint64_t min_count, uint32_t norm_cutoff, float min_norm,
             uint64_t max_rows) {
            nb::gil_scoped_release release;
            return t.staying({cutoff, count_cutoff, norm_cutoff, min_count, min_norm, max_rows});
          },
          nb::arg("cutoff") = 0, nb::arg("count_cutoff") = 0, nb::arg("min_count") = 0, nb::arg("norm_cutoff") = 0,
          nb::arg("min_norm") = 0.0f, nb::arg("max_rows") = 0)
      .def("begin_changes", &Table::begin_changes, nb::arg("all"), nb::call_guard<nb::gil_scoped_release>())
      .def("end_changes", &Table::end_changes, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "take_changes",
          [](Table& t) {
            std::vector<int64_t> keys;
            {
              nb::gil_scoped_release release;
              keys = t.take_changes();
            }
            const size_t n = keys.size();
            return array(std::move(keys), {n});
          },
          "Keys that changed, came or went since the last call, rising.")
      .def_prop_rw("notes", &Table::notes, &Table::set_notes)
      .def("begin_snapshot", &Table::begin_snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "finish_snapshot",
          [](Table& t, const std::string& folder, const std::string& previous) {
            Table::SnapshotStats stats;
            {
              nb::gil_scoped_release release;
              stats = t.finish_snapshot(folder, previous);
            }
            nb::dict d;
            d["rows"] = stats.rows;
            d["rows_written"] = stats.rows_written;
            d["bytes_written"] = stats.bytes_written;
            d["bytes_copied"] = stats.bytes_copied;
            return d;
          },
          nb::arg("folder"), nb::arg("previous") = "")
      .def("abandon_snapshot", &Table::abandon_snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &Table::clear, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "evict",
          [](Table& t, size_t rows) {
            nb::gil_scoped_release release;
            std::lock_guard lock(t.writer());
            if (!t.tier() || !t.tier()->evicts()) return size_t{0};
            const size_t gone = t.tier()->evict(rows);
            t.settle();
            return gone;
          },
          nb::arg("rows"), "Rows that leave DRAM now; for benchmarks and tests.")
      .def(
          "compact",
          [](Table& t, size_t records) {
            nb::gil_scoped_release release;
            return t.tier() ? t.tier()->compact(records) : 0;
          },
          nb::arg("records") = 4096)
      .def("load_snapshot", &Table::load_snapshot, nb::arg("folder"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "load_state",
          [](Table& t, const std::string& folder, uint32_t begin, uint32_t end) {
            if (begin > end || end > static_cast<uint32_t>(kShards))
              throw std::invalid_argument("load_state: shards out of range");
            nb::gil_scoped_release release;
            t.load_state(folder, begin, end);
          },
          nb::arg("folder"), nb::arg("begin") = 0, nb::arg("end") = kShards);

  nb::class_<SnapshotReader>(m, "SnapshotReader")
      .def(nb::init<const std::string&>(), nb::arg("folder"))
      .def_prop_ro("table", &SnapshotReader::table)
      .def_prop_ro("row_bytes", &SnapshotReader::row_bytes)
      .def_prop_ro("row_type", &SnapshotReader::row_type)
      .def_prop_ro("rows", &SnapshotReader::rows)
      .def(
          "next",
          [](SnapshotReader& reader, size_t most) -> nb::object {
            std::vector<RecordHead> heads;
            std::vector<char> bytes;
            std::vector<Place> places;
            {
              nb::gil_scoped_release release;
              if (reader.next(most, heads, bytes, places) == 0) heads.clear();
            }
            if (heads.empty()) return nb::none();
            return rows_tuple(heads, floats_of(bytes));
          },
          nb::arg("most") = 65536, "The next rows as (keys, counts, last steps, values), or None at the end.");

  nb::class_<SegmentScan>(m, "SegmentScan")
      .def(nb::init<const std::string&>(), nb::arg("path"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("table", [](const SegmentScan& scan) { return scan.id().table; })
      .def_prop_ro("segment", [](const SegmentScan& scan) { return scan.id().number; })
      .def_prop_ro("origin", [](const SegmentScan& scan) { return scan.id().origin; })
      .def_prop_ro("row_bytes", [](const SegmentScan& scan) { return scan.geometry().row_bytes; })
      .def_prop_ro("row_type", [](const SegmentScan& scan) { return scan.geometry().row_type; })
      .def_prop_ro("block_bytes", [](const SegmentScan& scan) { return scan.geometry().block_bytes; })
      .def_prop_ro("records_per_block", [](const SegmentScan& scan) { return scan.geometry().records_per_block; })
      .def_prop_ro("bytes", &SegmentScan::bytes)
      .def_prop_ro("blocks", &SegmentScan::blocks)
      .def_prop_ro("position", &SegmentScan::position)
      .def_prop_ro("bad", &SegmentScan::bad)
      .def(
          "next",
          [](SegmentScan& scan) -> nb::object {
            std::vector<RecordHead> heads;
            std::vector<char> bytes;
            std::vector<uint32_t> numbers;
            {
              nb::gil_scoped_release release;
              scan.next(heads, bytes, numbers);
            }
            if (heads.empty()) return nb::none();
            const size_t n = numbers.size();
            return nb::make_tuple(rows_tuple(heads, floats_of(bytes)), array(std::move(numbers), {n}));
          },
          "The next good records as ((keys, counts, last steps, values), numbers), or None at the end.");
  m.def(
      "read_adopted",
      [](const std::string& folder) -> nb::object {
        const std::string path = adopted_path(folder);
        if (!files().exists(path)) return nb::none();
        const Manifest manifest = decode(files().read_all(path), path);
        nb::dict segments;
        for (const auto& [number, part] : manifest.set.segments) {
          const size_t words = part.bits.size();
          segments[nb::cast(number)] =
              nb::make_tuple(manifest.origin.at(number), part.records, array(std::vector(part.bits), {words}));
        }
        return segments;
      },
      nb::arg("folder"), "What a log began with: {segment: (origin, records, bits of those that count)}, or None.");
  m.def(
      "replace_file", [](const std::string& path, nb::bytes data) { files().replace(path, data.c_str(), data.size()); },
      nb::arg("path"), nb::arg("data"), "The file holds what it held before or all of `data`, whatever happens.");

  m.def(
      "raw_reads",
      [](const std::vector<std::string>& paths, size_t count, uint32_t bytes, int depth, uint64_t seed) {
        nb::gil_scoped_release release;
        return raw_reads(paths, count, bytes, depth, seed);
      },
      nb::arg("paths"), nb::arg("count"), nb::arg("bytes") = 4096, nb::arg("depth") = 128, nb::arg("seed") = 0,
      "Seconds for so many random direct reads: what the device can do, for benchmarks.");

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
