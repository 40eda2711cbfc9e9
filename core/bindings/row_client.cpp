// Bindings of rowserver/row_client.h. The Python caller (src/hotrow/tiers/rows/) has checked the addresses.
#include "rowserver/row_client.h"

#include <fcntl.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>

#include <cerrno>
#include <utility>

#include "bindings/bindings.h"

namespace hotrow::bindings {
namespace {

// Table, pooling, number of bags, and the addresses of their offsets, keys and vectors.
using PooledTuple = std::tuple<uint32_t, uint32_t, size_t, Address, Address, Address>;

const char* name_of_error(RowError error) {
  switch (error) {
    case RowError::kBehind:
      return "behind";
    case RowError::kTooNew:
      return "too new";
    case RowError::kMalformed:
      return "malformed";
    case RowError::kFailed:
      return "failed";
    case RowError::kClosing:
      return "closing";
    default:
      return "";
  }
}

// A TLS connection for the handshake of a row server, in Python; then it becomes a RowConnection.
class TlsConnection {
 public:
  TlsConnection(int descriptor, const std::string& authorities, const std::string& host, double seconds)
      : socket_(descriptor), seconds_(seconds) {
    const int flags = fcntl(descriptor, F_GETFL);
    fcntl(descriptor, F_SETFL, flags | O_NONBLOCK);
    stream_ = std::make_unique<TlsStream>(TlsContext::for_client(authorities), descriptor, host);
    while (true) {
      const auto state = stream_->handshake();
      if (state == TlsStream::Handshake::kDone) return;
      if (state == TlsStream::Handshake::kFailed) throw std::runtime_error("TLS: " + stream_->error());
      wait();
    }
  }
  void send(const char* data, size_t bytes) {
    while (bytes > 0) {
      const ssize_t sent = stream_->send(data, bytes);
      if (sent == 0 || (sent < 0 && errno != EAGAIN)) throw std::runtime_error("TLS: the peer closed the connection");
      if (sent < 0) {
        wait();
        continue;
      }
      data += sent;
      bytes -= static_cast<size_t>(sent);
    }
  }
  std::string receive(size_t bytes) {
    std::string out(bytes, '\0');
    while (true) {
      const ssize_t got = stream_->receive(out.data(), bytes);
      if (got < 0 && errno == EAGAIN) {
        wait();
        continue;
      }
      out.resize(got > 0 ? static_cast<size_t>(got) : 0);
      return out;
    }
  }
  std::unique_ptr<RowConnection> detach() {
    return RowConnection::over_socket(std::exchange(socket_, Descriptor()).release(), std::move(stream_));
  }

 private:
  void wait() {
    pollfd poll{socket_.get(), static_cast<short>(stream_->wants_write() ? POLLOUT : POLLIN), 0};
    if (::poll(&poll, 1, static_cast<int>(seconds_ * 1000)) <= 0)
      throw std::runtime_error("TLS: the peer does not answer");
  }
  Descriptor socket_;
  std::unique_ptr<TlsStream> stream_;
  const double seconds_;
};

}  // namespace

void bind_row_client(nb::module_& m) {
  nb::class_<TlsConnection>(m, "TlsConnection")
      .def(nb::init<int, const std::string&, const std::string&, double>(), nb::arg("descriptor"),
           nb::arg("authorities"), nb::arg("host"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "sendall",
          [](TlsConnection& connection, nb::bytes data) {
            const std::string copy(data.c_str(), data.size());
            nb::gil_scoped_release release;
            connection.send(copy.data(), copy.size());
          },
          nb::arg("data"))
      .def(
          "recv",
          [](TlsConnection& connection, size_t bytes) {
            std::string data;
            {
              nb::gil_scoped_release release;
              data = connection.receive(bytes);
            }
            return nb::bytes(data.data(), data.size());
          },
          nb::arg("bytes"));

  nb::class_<RowClient>(m, "RowClient")
      .def(
          "__init__",
          [](RowClient* self, const std::vector<int>& dims, uint32_t wire, bool hedges, double hedge_least) {
            require(wire < kRowTypes && static_cast<RowType>(wire) != RowType::kBFloat, "RowClient: unknown wire type");
            new (self) RowClient(dims, {hedge_least, hedges, static_cast<RowType>(wire)});
          },
          nb::arg("dims"), nb::arg("wire") = 0, nb::arg("hedges") = true, nb::arg("hedge_least") = 0.001)
      .def("add_server", &RowClient::add_server)
      .def(
          "add_socket",
          [](RowClient& client, uint32_t number, int descriptor, bool for_pings) {
            client.add_connection(number, RowConnection::over_socket(descriptor), for_pings);
          },
          nb::arg("number"), nb::arg("descriptor"), nb::arg("for_pings"))
      .def(
          "add_tls",
          [](RowClient& client, uint32_t number, TlsConnection& connection, bool for_pings) {
            client.add_connection(number, connection.detach(), for_pings);
          },
          nb::arg("number"), nb::arg("connection"), nb::arg("for_pings"))
      .def(
          "add_slots",
          [](RowClient& client, uint32_t number, const std::vector<int>& descriptors) {
            auto slots = std::make_shared<SharedSlots>(descriptors);
            for (size_t slot = 0; slot < SharedSlots::kSlots; ++slot)
              client.add_connection(number, RowConnection::over_slot(slots, slot), slot == 0);
          },
          nb::arg("number"), nb::arg("descriptors"))
      .def("disconnect", &RowClient::disconnect, nb::arg("number"), nb::call_guard<nb::gil_scoped_release>())
      .def("ping", &RowClient::ping, nb::arg("number"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "lookup",
          [](RowClient& client, const std::vector<std::vector<uint32_t>>& servers, const std::vector<uint32_t>& tables,
             const std::vector<std::vector<uint32_t>>& counts, Address keys, int64_t publication, double seconds,
             Address out, Address found, const std::vector<PooledTuple>& given) {
            require(counts.size() == servers.size(), "lookup: give counts for each range");
            std::vector<PooledFeature> pooled;
            for (const auto& [table, pooling, bags, offsets, ids, values] : given)
              pooled.push_back({table, static_cast<Pooling>(pooling), bags, at<const int64_t>(offsets),
                                at<const int64_t>(ids), at<float>(values)});
            RowLookupResult result;
            {
              nb::gil_scoped_release release;
              result = client.lookup({&servers, &tables, &counts, at<const int64_t>(keys), publication, seconds,
                                      at<float>(out), at<bool>(found), &pooled});
            }
            nb::list late, errors;
            for (size_t range = 0; range < result.late.size(); ++range) {
              if (!result.late[range]) continue;
              late.append(range);
              errors.append(name_of_error(result.errors[range]));
            }
            return nb::make_tuple(late, errors, result.bytes, result.hedges, result.hedges_won, result.retries);
          },
          nb::arg("servers"), nb::arg("tables"), nb::arg("counts"), nb::arg("keys"), nb::arg("publication"),
          nb::arg("seconds"), nb::arg("out"), nb::arg("found") = 0, nb::arg("pooled") = std::vector<PooledTuple>())
      .def_prop_ro("hedge_seconds", &RowClient::hedge_seconds)
      .def(
          "server",
          [](const RowClient& client, uint32_t number) {
            const RowClient::ServerState state = client.server(number);
            nb::dict d;
            d["connections"] = state.connections;
            d["publication"] = state.publication;
            d["oldest"] = state.oldest;
            d["in_flight"] = state.in_flight;
            d["seconds"] = state.seconds;
            d["answers"] = state.answers;
            d["errors"] = state.errors;
            return d;
          },
          nb::arg("number"));
}

}  // namespace hotrow::bindings
