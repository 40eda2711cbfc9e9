// Bindings of a table's SSD tier, change tracking, snapshots, admission and expiry.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "table/table.h"

namespace hotrow::bindings {
namespace {

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

void bind_table_storage(nb::class_<Table>& table) {
  table
      .def(
          "attach",
          [](Table& t, const std::string& folder, bool evicts, size_t buffer_bytes, uint64_t segment_bytes, int depth,
             nb::object, bool cache_only) {
            nb::gil_scoped_release release;
            LogOptions options{folder, t.options().name, static_cast<uint32_t>(t.width() * sizeof(float))};
            options.buffer_bytes = buffer_bytes;
            options.segment_bytes = segment_bytes;
            options.depth = depth;
            options.row_type = static_cast<uint32_t>(t.options().type);
            t.attach(std::make_unique<Log>(options), evicts, cache_only);
          },
          nb::arg("folder"), nb::arg("evicts"), nb::arg("buffer_bytes") = size_t{1} << 20,
          nb::arg("segment_bytes") = uint64_t{64} << 20, nb::arg("depth") = 128, nb::arg("lock") = nb::none(),
          nb::arg("drops") = false, nb::keep_alive<1, 7>(),
          "Attaches a log; with `evicts`, DRAM becomes a cache over it. `lock` is kept while the table lives. A batch "
          "or a save may keep the table alive longer than its collection.")
      .def_prop_ro("has_log", [](const Table& t) { return t.tier() != nullptr; })
      .def_prop_ro("evicts", [](const Table& t) { return t.tier() && t.tier()->evicts(); })
      .def("tier",
           [](const Table& t) {
             TierReport report;
             {
               nb::gil_scoped_release release;
               std::lock_guard lock(t.write_mutex());
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
          nb::arg("keys").noconvert(), "Reads rows from SSD into DRAM; returns how many.")
      .def(
          "warm",
          [](Table& t, Vector<const int64_t> keys) {
            nb::gil_scoped_release release;
            t.mark_used(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert(), "Raises the heat of these keys' rows, so that they are evicted later.")
      .def(
          "scan_cold",
          [](const Table& t, uint32_t shard) {
            std::vector<RecordHead> heads;
            std::vector<float> rows;
            {
              nb::gil_scoped_release release;
              std::lock_guard lock(t.write_mutex());
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
             uint64_t max_rows, uint64_t rows_on_other_ranks) {
            nb::gil_scoped_release release;
            return t.sweep({cutoff, count_cutoff, norm_cutoff, min_count, min_norm, max_rows}, rows_on_other_ranks);
          },
          nb::arg("cutoff") = 0, nb::arg("count_cutoff") = 0, nb::arg("min_count") = 0, nb::arg("norm_cutoff") = 0,
          nb::arg("min_norm") = 0.0f, nb::arg("max_rows") = 0, nb::arg("elsewhere") = 0)
      .def(
          "staying",
          [](Table& t, uint32_t cutoff, uint32_t count_cutoff, uint64_t min_count, uint32_t norm_cutoff, float min_norm,
             uint64_t max_rows) {
            nb::gil_scoped_release release;
            return t.count_surviving({cutoff, count_cutoff, norm_cutoff, min_count, min_norm, max_rows});
          },
          nb::arg("cutoff") = 0, nb::arg("count_cutoff") = 0, nb::arg("min_count") = 0, nb::arg("norm_cutoff") = 0,
          nb::arg("min_norm") = 0.0f, nb::arg("max_rows") = 0)
      .def("begin_changes", &Table::start_tracking_changes, nb::arg("all"), nb::call_guard<nb::gil_scoped_release>())
      .def("end_changes", &Table::stop_tracking_changes, nb::call_guard<nb::gil_scoped_release>())
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
          "Returns the keys changed, created or removed since the last call, ascending.")
      .def_prop_rw("notes", &Table::user_state, &Table::set_user_state)
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
}

}  // namespace hotrow::bindings
