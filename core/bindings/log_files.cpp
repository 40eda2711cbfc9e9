// Bindings of the files of logs and snapshots: readers for inspection and loading, folder locks, atomic replacement.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "log/manifest.h"
#include "segment/segment_scan.h"

namespace hotrow::bindings {

void bind_log_files(nb::module_& m) {
  nb::exception<IoError>(m, "IoError", PyExc_OSError);
  nb::exception<CorruptFile>(m, "CorruptFile", PyExc_RuntimeError);

  nb::class_<FolderLock>(m, "FolderLock");
  m.def(
      "lock_folder",
      [](const std::string& folder) {
        files().make_folder(folder);
        return files().lock(folder);
      },
      nb::arg("folder"), "Locks a folder against other processes while the returned object lives.");

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
            std::vector<RecordAddress> places;
            {
              nb::gil_scoped_release release;
              if (reader.next(most, heads, bytes, places) == 0) heads.clear();
            }
            if (heads.empty()) return nb::none();
            return rows_tuple(heads, floats_of(bytes));
          },
          nb::arg("most") = 65536, "Returns the next rows as (keys, counts, last steps, values), or None at the end.");

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
          "Returns the next valid records as ((keys, counts, last steps, values), numbers), or None at the end.");
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
      nb::arg("folder"), "Returns the snapshot that a log imported: {segment: (origin, records, live bits)}, or None.");
  m.def(
      "replace_file", [](const std::string& path, nb::bytes data) { files().replace(path, data.c_str(), data.size()); },
      nb::arg("path"), nb::arg("data"),
      "Replaces a file atomically: after a crash it has its old contents or all of `data`.");
}

}  // namespace hotrow::bindings
