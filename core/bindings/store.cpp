// Tables and plans for Python. Bulk calls take arrays (torch or numpy, no copies); a plan's hot calls take addresses
// that src/hotrow/tiers/host.py has checked, because wrapping 26 tensors a batch as arrays would cost more than the
// lookup.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "bindings/bindings.h"
#include "rows/plan.h"
#include "rows/table.h"
#include "threads/pool.h"

namespace hotrow::bindings {
namespace {

template <class T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FeatureTuple =
    std::tuple<Address, size_t, Address, size_t, Address, int>;   // keys, count, offsets, bags, weights, pooling
using MatrixTuple = std::tuple<Address, size_t, size_t, size_t>;  // data, rows, columns, stride
using KeysTuple = std::tuple<std::shared_ptr<Table>, Address, size_t>;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

std::vector<Matrix> matrices(const std::vector<MatrixTuple>& tuples) {
  std::vector<Matrix> result;
  for (const auto& [data, rows, columns, stride] : tuples)
    result.push_back({reinterpret_cast<float*>(data), rows, columns, stride});
  return result;
}

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

void bind_store(nb::module_& m) {
  nb::exception<BudgetExceeded>(m, "BudgetExceeded", PyExc_MemoryError);
  nb::exception<GradientNotFinite>(m, "GradientNotFinite", PyExc_ValueError);

  m.def("threads", [] { return Pool::shared().threads(); }, "Threads that the core uses, the caller included.");
  m.def(
      "set_threads",
      [](int threads, int nice) {
        require(threads >= 1, "threads must be at least 1");
        nb::gil_scoped_release release;
        Pool::shared().set_threads(threads, nice);
      },
      nb::arg("threads"), nb::arg("nice") = 0);
  m.def("simd", [] { return kernels().name; }, "The instruction set in use.");

  nb::class_<Budget>(m, "Budget")
      .def(nb::init<size_t>(), nb::arg("limit") = 0)
      .def_prop_ro("limit", &Budget::limit)
      .def_prop_ro("used", &Budget::used)
      .def("take", &Budget::take, nb::arg("bytes"), "Count memory that others hold.")
      .def("give_back", &Budget::give_back, nb::arg("bytes"));

  nb::class_<Table> table(m, "Table");
  table
      .def(
          "__init__",
          [](Table* self, std::string name, int dim, int rule, const std::vector<std::tuple<int, float>>& state,
             std::tuple<int, float, float> initial, uint64_t seed, std::shared_ptr<Budget> budget, bool frozen,
             uint32_t type, uint32_t drawn) {
            require(dim > 0 && rule >= 0 && rule < static_cast<int>(RuleKind::kCount),
                    "Table: dim or rule out of range");
            require(type < kRowTypes && drawn < kRowTypes, "Table: row type out of range");
            TableOptions options{std::move(name),
                                 dim,
                                 static_cast<RuleKind>(rule),
                                 {},
                                 {},
                                 seed,
                                 frozen,
                                 static_cast<RowType>(type),
                                 static_cast<RowType>(drawn)};
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
            table.read_raw(keys.data(), keys.size(), reinterpret_cast<uint32_t*>(out.data()), found.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert(), nb::arg("found").noconvert(),
          "Rows of keys in DRAM as they are kept, for a GPU above.")
      .def("check_trainable", [](const Table& table) { table.refuse_if_frozen("its rows cannot be trained"); })
      .def(
          "cold",
          [](const Table& table, Vector<const int64_t> keys, Vector<bool> out) {
            require(out.size() == keys.size(), "cold: arrays differ in length");
            nb::gil_scoped_release release;
            return table.cold(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
          "Which keys have rows on SSD alone; returns how many.")
      .def(
          "read_warm",
          [](const Table& table, Vector<const int64_t> keys, int policy, Rows<float> out, Vector<uint8_t> late) {
            require(out.shape(0) == keys.size() && static_cast<int>(out.shape(1)) == table.dim() &&
                        late.size() == keys.size(),
                    "read_warm: out must be [keys, dim] and late [keys]");
            require(policy == 1 || policy == 2, "read_warm: the policy is 1 (initial) or 2 (default)");
            nb::gil_scoped_release release;
            std::fill_n(late.data(), late.size(), uint8_t{0});
            return table.read_warm(keys.data(), nullptr, keys.size(), static_cast<Cold>(policy), out.data(),
                                   late.data());
          },
          nb::arg("keys").noconvert(), nb::arg("policy"), nb::arg("out").noconvert(), nb::arg("late").noconvert(),
          "Values of the keys without the disk; `late` says whose row is there alone. Returns how many.")
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
          "Slots of the keys into `slots`, -1 where there is no row.")
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
          nb::arg("keys").noconvert(), "Gives unseen keys their initial row.")
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
          "Values of the keys; unseen ones read their initial row.")
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
            std::lock_guard lock(table.writer());
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
          "Rows in slot order from `start`; returns (where to go on, how many were written).")
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

  bind_durable(m);
  m.def(
      "count_cold",
      [](const std::vector<KeysTuple>& parts) {
        nb::gil_scoped_release release;
        size_t total = 0;
        for (const auto& [of, keys, count] : parts)
          total += of->cold(reinterpret_cast<const int64_t*>(keys), count, nullptr);
        return total;
      },
      nb::arg("parts"), "How many keys of several tables have rows on SSD alone. Does not touch the disk.");
  m.def(
      "prefetch_all",
      [](const std::vector<KeysTuple>& parts) {
        nb::gil_scoped_release release;
        std::atomic<size_t> came{0};
        Pool::waiting().run(static_cast<int>(parts.size()), [&](int p) {
          const auto& [of, keys, count] = parts[p];
          came += of->prefetch(reinterpret_cast<const int64_t*>(keys), count);
        });
        return came.load();
      },
      nb::arg("parts"), "Brings rows of several tables up from SSD at once; returns how many came.");

  nb::class_<Plan> plan(m, "Plan");
  plan.def(nb::init<>())
      .def("route", &route, nb::arg("jobs"))
      .def("fetch", &Plan::fetch, nb::arg("step") = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "prefetch",
          [](Plan& plan) {
            const Plan::Prefetched came = [&] {
              nb::gil_scoped_release release;
              return plan.prefetch();
            }();
            return std::make_tuple(came.rows, came.bytes, came.short_of_room);
          },
          "Brings rows up from SSD and keeps them for fetch; returns (rows, bytes, whether room was short).")
      .def("release", &Plan::release, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read",
          [](Plan& plan, int policy) {
            require(policy >= 0 && policy <= 2, "read: the policy is 0 (wait), 1 (initial) or 2 (default)");
            nb::gil_scoped_release release;
            return plan.read(static_cast<Cold>(policy));
          },
          nb::arg("policy") = 0, "Copies the rows; returns how many ids a policy answered.")
      .def(
          "count_late",
          [](const Plan& plan, Vector<int32_t> counts) {
            nb::gil_scoped_release release;
            plan.count_late(reinterpret_cast<uint32_t*>(counts.data()), counts.size());
          },
          nb::arg("counts").noconvert(), "How many ids of each example a policy answered.")
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
      .def_prop_ro("late", &Plan::late)
      .def_prop_ro("unique", &Plan::unique)
      .def_prop_ro("bytes", &Plan::bytes);

  bind_device(m, table, plan);
  bind_ranks(plan);
}

}  // namespace hotrow::bindings
