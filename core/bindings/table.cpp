// Bindings of tables and budgets. Bulk calls take arrays (torch or numpy) without a copy.
#include "table/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "bindings/bindings.h"
#include "threads/thread_pool.h"

namespace hotrow::bindings {
namespace {

template <class T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using KeysTuple = std::tuple<std::shared_ptr<Table>, Address, size_t>;

void assign(Table& table, Vector<const int64_t> keys, Rows<const float> rows,
            std::optional<Vector<const int64_t>> counts, std::optional<Vector<const int64_t>> last_steps) {
  const size_t count = keys.size();
  const auto floats = static_cast<int>(rows.shape(1));
  require(rows.shape(0) == count, "assign: give one row per key");
  require(floats == table.dim() || floats == table.floats(), "assign: rows must have dim or full width columns");
  require(!counts || counts->size() == count, "assign: give one count per key");
  require(!last_steps || last_steps->size() == count, "assign: give one last step per key");
  std::vector<uint64_t> seen;
  std::vector<uint32_t> steps;
  if (counts) seen.assign(counts->data(), counts->data() + count);
  if (last_steps) steps.assign(last_steps->data(), last_steps->data() + count);
  nb::gil_scoped_release release;
  table.assign(keys.data(), count, rows.data(), floats, counts ? seen.data() : nullptr,
               last_steps ? steps.data() : nullptr);
}

}  // namespace

nb::class_<Table> bind_table(nb::module_& m) {
  nb::exception<BudgetExceeded>(m, "BudgetExceeded", PyExc_MemoryError);

  m.def(
      "threads", [] { return ThreadPool::shared().threads(); },
      "Number of threads that the core uses, the caller included.");
  m.def(
      "set_threads",
      [](int threads, int nice) {
        require(threads >= 1, "threads must be at least 1");
        nb::gil_scoped_release release;
        ThreadPool::shared().set_threads(threads, nice);
      },
      nb::arg("threads"), nb::arg("nice") = 0);

  nb::class_<Budget>(m, "Budget")
      .def(nb::init<size_t>(), nb::arg("limit") = 0)
      .def_prop_ro("limit", &Budget::limit)
      .def_prop_ro("used", &Budget::used)
      .def("take", &Budget::charge, nb::arg("bytes"), "Charges memory that is allocated outside of the core.")
      .def("give_back", &Budget::uncharge, nb::arg("bytes"));

  nb::class_<Table> table(m, "Table");
  table
      .def(
          "__init__",
          [](Table* self, std::string name, int dim, int rule, const std::vector<std::tuple<int, float>>& state,
             std::tuple<int, float, float> initial, uint64_t seed, std::shared_ptr<Budget> budget, bool frozen,
             uint32_t type, uint32_t initial_type) {
            require(dim > 0 && rule >= 0 && rule < static_cast<int>(RuleKind::kCount),
                    "Table: dim or rule out of range");
            require(type < kRowTypes && initial_type < kRowTypes, "Table: row type out of range");
            TableOptions options{std::move(name),
                                 dim,
                                 static_cast<RuleKind>(rule),
                                 {},
                                 {},
                                 seed,
                                 frozen,
                                 static_cast<RowType>(type),
                                 static_cast<RowType>(initial_type)};
            for (const auto& [width, value] : state) options.state.push_back({width, value});
            options.initial = {static_cast<InitialKind>(std::get<0>(initial)), std::get<1>(initial),
                               std::get<2>(initial)};
            new (self) Table(std::move(options), std::move(budget));
          },
          nb::arg("name"), nb::arg("dim"), nb::arg("rule"), nb::arg("state"), nb::arg("initial"), nb::arg("seed"),
          nb::arg("budget"), nb::arg("frozen") = false, nb::arg("type") = 0, nb::arg("drawn") = 0)
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("width", &Table::floats)
      .def_prop_ro("row_bytes", [](const Table& table) { return table.width() * sizeof(float); })
      .def(
          "set_default_row", [](Table& table, std::vector<float> row) { table.set_default_row(std::move(row)); },
          nb::arg("row"))
      .def_prop_ro("default_row", &Table::default_row)
      .def(
          "read_raw",
          [](const Table& table, Vector<const int64_t> keys, Rows<float> out, Vector<bool> found) {
            require(out.shape(0) == keys.size() && static_cast<int>(out.shape(1)) == table.width() &&
                        found.size() == keys.size(),
                    "read_raw: out must be [keys, words of a row] and found [keys]");
            nb::gil_scoped_release release;
            table.read_encoded(keys.data(), keys.size(), reinterpret_cast<uint32_t*>(out.data()), found.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert(), nb::arg("found").noconvert(),
          "Reads encoded rows of keys in DRAM, for a GPU cache above this table.")
      .def("check_trainable", [](const Table& table) { table.require_trainable("its rows cannot be trained"); })
      .def(
          "cold",
          [](const Table& table, Vector<const int64_t> keys, Vector<bool> out) {
            require(out.size() == keys.size(), "cold: arrays differ in length");
            nb::gil_scoped_release release;
            return table.on_ssd(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
          "Finds keys whose rows are only on SSD; returns how many.")
      .def(
          "read_warm",
          [](const Table& table, Vector<const int64_t> keys, int policy, Rows<float> out, Vector<uint8_t> late) {
            require(out.shape(0) == keys.size() && static_cast<int>(out.shape(1)) == table.dim() &&
                        late.size() == keys.size(),
                    "read_warm: out must be [keys, dim] and late [keys]");
            require(policy == 1 || policy == 2, "read_warm: the policy is 1 (initial) or 2 (default)");
            nb::gil_scoped_release release;
            std::fill_n(late.data(), late.size(), uint8_t{0});
            return table.read_without_io(keys.data(), nullptr, keys.size(), static_cast<ColdReadPolicy>(policy),
                                         out.data(), late.data());
          },
          nb::arg("keys").noconvert(), nb::arg("policy"), nb::arg("out").noconvert(), nb::arg("late").noconvert(),
          "Reads values without reading the disk; sets `late` for keys that the policy answered. Returns how many.")
      .def_prop_ro("slots", &Table::slots)
      .def("__len__", &Table::size)
      .def(
          "find",
          [](const Table& table, Vector<const int64_t> keys, Vector<int64_t> slots) {
            require(keys.size() == slots.size(), "find: keys and slots differ in length");
            nb::gil_scoped_release release;
            std::vector<uint32_t> found(keys.size());
            table.find(keys.data(), keys.size(), found.data());
            for (size_t i = 0; i < found.size(); ++i) slots.data()[i] = found[i] == kNoSlot ? -1 : int64_t{found[i]};
          },
          nb::arg("keys").noconvert(), nb::arg("slots").noconvert(),
          "Writes the keys' slots to `slots`; -1 for a key without a row.")
      .def(
          "find_or_create",
          [](Table& table, Vector<const int64_t> keys, Vector<int64_t> slots) {
            require(keys.size() == slots.size(), "find_or_create: keys and slots differ in length");
            nb::gil_scoped_release release;
            std::vector<uint32_t> found(keys.size());
            table.find_or_create(keys.data(), keys.size(), found.data());
            std::copy(found.begin(), found.end(), slots.data());
          },
          nb::arg("keys").noconvert(), nb::arg("slots").noconvert())
      .def(
          "create",
          [](Table& table, Vector<const int64_t> keys) {
            nb::gil_scoped_release release;
            table.find_or_create(keys.data(), keys.size(), nullptr);
          },
          nb::arg("keys").noconvert(), "Creates initial rows for unseen keys.")
      .def(
          "read",
          [](const Table& table, Vector<const int64_t> keys, Rows<float> out, Vector<bool> found) {
            require(out.shape(0) == keys.size() && static_cast<int>(out.shape(1)) == table.dim() &&
                        found.size() == keys.size(),
                    "read: out must be [keys, dim] and found [keys]");
            nb::gil_scoped_release release;
            table.read(keys.data(), nullptr, keys.size(), out.data(), found.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert(), nb::arg("found").noconvert(),
          "Reads the values of the keys; an unseen key reads its initial values.")
      .def("assign", &assign, nb::arg("keys").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("counts").noconvert().none(), nb::arg("last_steps").noconvert().none())
      .def(
          "erase",
          [](Table& table, Vector<const int64_t> keys) {
            nb::gil_scoped_release release;
            return table.erase(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert())
      .def(
          "scan",
          [](const Table& table, uint64_t start, Rows<float> rows, Vector<int64_t> keys, Vector<int64_t> counts,
             Vector<int64_t> last_steps) {
            const size_t most = keys.size();
            require(rows.shape(0) == most && static_cast<int>(rows.shape(1)) == table.floats() &&
                        counts.size() == most && last_steps.size() == most,
                    "scan: rows must be [n, width], the others [n]");
            nb::gil_scoped_release release;
            std::lock_guard lock(table.write_mutex());
            std::vector<uint32_t> live, steps(most);
            std::vector<uint64_t> seen(most);
            uint64_t next = table.scan(start, most, live);
            table.read_slots(live.data(), live.size(), rows.data(), keys.data(), seen.data(), steps.data());
            std::copy_n(seen.begin(), live.size(), counts.data());
            std::copy_n(steps.begin(), live.size(), last_steps.data());
            return std::make_tuple(next, live.size());
          },
          nb::arg("start"), nb::arg("rows").noconvert(), nb::arg("keys").noconvert(), nb::arg("counts").noconvert(),
          nb::arg("last_steps").noconvert(),
          "Reads rows in slot order from `start`; returns (slot to continue from, number of rows).")
      .def("memory", [](const Table& table) {
        MemoryReport report = [&] {
          nb::gil_scoped_release release;
          return table.memory();
        }();
        nb::dict d;
        d["rows"] = report.rows;
        d["payload_bytes"] = report.payload_bytes;
        d["row_bytes"] = report.row_bytes;
        d["header_bytes"] = report.header_bytes;
        d["index_bytes"] = report.index_bytes;
        d["tier_bytes"] = report.tier_bytes;
        d["sketch_bytes"] = report.sketch_bytes;
        d["total_bytes"] = report.total_bytes;
        return d;
      });
  m.def(
      "count_cold",
      [](const std::vector<KeysTuple>& parts) {
        nb::gil_scoped_release release;
        size_t total = 0;
        for (const auto& [of, keys, count] : parts)
          total += of->on_ssd(reinterpret_cast<const int64_t*>(keys), count, nullptr);
        return total;
      },
      nb::arg("parts"), "Counts the keys of several tables whose rows are only on SSD, without reading the disk.");
  m.def(
      "prefetch_all",
      [](const std::vector<KeysTuple>& parts) {
        nb::gil_scoped_release release;
        std::atomic<size_t> promoted{0};
        ThreadPool::io_pool().run(static_cast<int>(parts.size()), [&](int p) {
          const auto& [of, keys, count] = parts[p];
          promoted += of->prefetch(reinterpret_cast<const int64_t*>(keys), count);
        });
        return promoted.load();
      },
      nb::arg("parts"), "Reads rows of several tables from SSD into DRAM; returns how many.");
  return table;
}

}  // namespace hotrow::bindings
