// Bindings of rowserver/row_service.h and rowserver/row_server.h.
#include "rowserver/row_server.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace hotrow::bindings {
namespace {

struct PreparedChanges {
  std::vector<ChangedRows> rows;
};

// A server whose threads may call Python. They end without the interpreter lock, or they would wait for it for ever.
class PythonRowServer {
 public:
  PythonRowServer(RowServerOptions options, nb::callable prove, std::shared_ptr<TlsContext> tls)
      : prove_(std::move(prove)) {
    server_ = std::make_unique<RowServer>(
        options,
        [this](std::string_view challenge, std::string_view hello) -> RowServer::Proven {
          const nb::gil_scoped_acquire acquire;
          try {
            const auto [service, welcome] = nb::cast<std::tuple<std::shared_ptr<RowService>, nb::bytes>>(
                prove_(nb::bytes(challenge.data(), challenge.size()), nb::bytes(hello.data(), hello.size())));
            return {service, {welcome.c_str(), welcome.size()}};
          } catch (nb::python_error& error) {
            throw std::runtime_error(nb::str(error.value()).c_str());
          }
        },
        std::move(tls));
  }
  ~PythonRowServer() { close(0); }
  void close(double seconds) {
    const nb::gil_scoped_release release;
    server_->close(seconds);
  }
  RowServer& server() { return *server_; }

 private:
  nb::callable prove_;
  std::unique_ptr<RowServer> server_;
};

}  // namespace

void bind_row_server(nb::module_& m) {
  nb::class_<PreparedChanges>(m, "PreparedChanges");

  nb::class_<RowService>(m, "RowService")
      .def(nb::init<std::vector<std::shared_ptr<Table>>, int64_t, size_t, size_t>(), nb::arg("tables"),
           nb::arg("publication"), nb::arg("history_entries"), nb::arg("history_bytes"))
      .def_prop_ro("publication", &RowService::publication)
      .def_prop_ro("oldest", &RowService::oldest)
      .def(
          "prepare",
          [](const RowService& service, const std::vector<std::tuple<uint32_t, Vector<const int64_t>>>& changes) {
            std::vector<RowService::Change> given;
            for (const auto& [table, keys] : changes)
              given.push_back({table, {keys.data(), keys.data() + keys.size()}});
            nb::gil_scoped_release release;
            return PreparedChanges{service.prepare(given)};
          },
          nb::arg("changes"), "Keeps the current rows of (table, keys) for the history.")
      .def("begin_cut_over", &RowService::begin_cut_over, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end_cut_over",
          [](RowService& service, int64_t publication, PreparedChanges* before) {
            service.end_cut_over(publication, before ? &before->rows : nullptr);
          },
          nb::arg("publication"), nb::arg("before").none())
      .def_prop_ro("connections", [](RowService& service) { return service.connections().load(); })
      .def("retire", &RowService::retire)
      .def("abandon_cut_over", &RowService::abandon_cut_over)
      .def("replace_tables", &RowService::replace_tables, nb::arg("tables"))
      .def("figures", [](const RowService& service) {
        const RowService::Figures figures = service.figures();
        nb::dict d;
        d["lookups"] = figures.lookups;
        d["keys"] = figures.keys;
        d["restored"] = figures.restored;
        d["history_publications"] = figures.history_entries;
        d["history_bytes"] = figures.history_bytes;
        return d;
      });

  nb::class_<PythonRowServer>(m, "RowServer")
      .def(
          "__init__",
          [](PythonRowServer* self, nb::callable prove, int threads, int cold_threads, size_t most_connections,
             size_t most_unproven, size_t most_waiting, double hello_seconds, double stall_seconds,
             const std::string& certificate, const std::string& key) {
            const RowServerOptions options{threads,      cold_threads,  most_connections, most_unproven,
                                           most_waiting, hello_seconds, stall_seconds};
            auto tls = certificate.empty() ? nullptr : TlsContext::for_server(certificate, key);
            new (self) PythonRowServer(options, std::move(prove), std::move(tls));
          },
          nb::arg("prove"), nb::arg("threads") = 1, nb::arg("cold_threads") = 4, nb::arg("most_connections") = 16384,
          nb::arg("most_unproven") = 1024, nb::arg("most_waiting") = size_t{64} << 20, nb::arg("hello_seconds") = 10.0,
          nb::arg("stall_seconds") = 30.0, nb::arg("certificate") = "", nb::arg("key") = "")
      .def(
          "listen", [](PythonRowServer& self, int descriptor) { self.server().listen(descriptor); },
          nb::arg("descriptor"))
      .def(
          "add_local",
          [](PythonRowServer& self, int control, std::shared_ptr<RowService> service) {
            return self.server().add_local(control, std::move(service));
          },
          nb::arg("control"), nb::arg("service"))
      .def("close", &PythonRowServer::close, nb::arg("seconds"))
      .def("figures", [](PythonRowServer& self) {
        const RowServerFigures figures = self.server().figures();
        nb::dict d;
        d["connections"] = figures.connections;
        d["accepted"] = figures.accepted;
        d["refused"] = figures.refused;
        d["malformed"] = figures.malformed;
        d["stalled"] = figures.stalled;
        d["cold"] = figures.lookups_cold;
        d["errors"] = figures.errors;
        d["bytes_in"] = figures.bytes_in;
        d["bytes_out"] = figures.bytes_out;
        return d;
      });
}

}  // namespace hotrow::bindings
