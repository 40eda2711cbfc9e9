// Mailboxes for src/hotrow/parallel/exchange.py, which has checked what is behind the addresses.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "exchange/mailbox.h"

namespace hotrow::bindings {

void bind_exchange(nb::module_& m) {
  using AddressTuple = std::tuple<int64_t, int64_t, uint64_t>;  // process, descriptor, token
  nb::class_<Mailbox>(m, "Mailbox")
      .def(nb::init<size_t, size_t, double>(), nb::arg("rank"), nb::arg("world"), nb::arg("timeout"))
      .def_prop_ro("address",
                   [](const Mailbox& box) {
                     const MailboxAddress mine = box.address();
                     return AddressTuple(mine.process, mine.descriptor, mine.token);
                   })
      .def(
          "connect",
          [](Mailbox& box, const std::vector<AddressTuple>& everybody) {
            std::vector<MailboxAddress> addresses;
            for (const auto& [process, descriptor, token] : everybody)
              addresses.push_back({process, descriptor, token});
            box.connect(addresses);
          },
          nb::arg("everybody"))
      .def(
          "begin",
          [](Mailbox& box, Address send, const std::vector<size_t>& to, bool same, Address out,
             const std::vector<size_t>& from, bool own) {
            nb::gil_scoped_release release;
            return box.begin(at<const char>(send), to, same, at<char>(out), from, own);
          },
          nb::arg("send"), nb::arg("to"), nb::arg("same"), nb::arg("out"), nb::arg("come"), nb::arg("own") = true)
      .def(
          "wait",
          [](Mailbox& box, uint32_t number) {
            nb::gil_scoped_release release;
            box.wait(number);
          },
          nb::arg("number"))
      .def("close", &Mailbox::close);
}

}  // namespace hotrow::bindings
