// Bindings of exchange/shared_memory_exchange.h and exchange/socket_exchange.h. The Python caller
// (src/hotrow/parallel/exchange.py) has checked every address passed here.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "exchange/shared_memory_exchange.h"
#include "exchange/socket_exchange.h"

namespace hotrow::bindings {

void bind_exchange(nb::module_& m) {
  using AddressTuple = std::tuple<int64_t, int64_t, uint64_t>;  // process, descriptor, token
  nb::class_<SharedMemoryExchange>(m, "SharedMemoryExchange")
      .def(nb::init<size_t, size_t, double>(), nb::arg("rank"), nb::arg("world"), nb::arg("timeout"))
      .def_prop_ro("address",
                   [](const SharedMemoryExchange& exchange) {
                     const SegmentAddress mine = exchange.address();
                     return AddressTuple(mine.process, mine.descriptor, mine.token);
                   })
      .def(
          "connect",
          [](SharedMemoryExchange& exchange, const std::vector<AddressTuple>& peers) {
            std::vector<SegmentAddress> addresses;
            for (const auto& [process, descriptor, token] : peers) addresses.push_back({process, descriptor, token});
            exchange.connect(addresses);
          },
          nb::arg("addresses"))
      .def(
          "begin",
          [](SharedMemoryExchange& exchange, Address send, const std::vector<size_t>& to, bool broadcast, Address out,
             const std::vector<size_t>& from, bool own) {
            nb::gil_scoped_release release;
            return exchange.begin(at<const char>(send), to, broadcast, at<char>(out), from, own);
          },
          nb::arg("send"), nb::arg("to"), nb::arg("broadcast"), nb::arg("out"), nb::arg("from"), nb::arg("own") = true)
      .def(
          "wait",
          [](SharedMemoryExchange& exchange, uint32_t number) {
            nb::gil_scoped_release release;
            exchange.wait(number);
          },
          nb::arg("number"))
      .def("close", &SharedMemoryExchange::close);

  nb::class_<SocketExchange>(m, "SocketExchange")
      .def(nb::init<size_t, size_t, double>(), nb::arg("rank"), nb::arg("world"), nb::arg("timeout"))
      .def("connect", &SocketExchange::connect, nb::arg("descriptors"))
      .def(
          "begin",
          [](SocketExchange& exchange, Address send, const std::vector<size_t>& to, bool broadcast, Address out,
             const std::vector<size_t>& from, bool own) {
            nb::gil_scoped_release release;
            return exchange.begin(at<const char>(send), to, broadcast, at<char>(out), from, own);
          },
          nb::arg("send"), nb::arg("to"), nb::arg("broadcast"), nb::arg("out"), nb::arg("from"), nb::arg("own") = true)
      .def("is_complete", &SocketExchange::is_complete, nb::arg("number"), nb::call_guard<nb::gil_scoped_release>())
      .def("wait", &SocketExchange::wait, nb::arg("number"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &SocketExchange::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_sent", &SocketExchange::bytes_sent);
}

}  // namespace hotrow::bindings
