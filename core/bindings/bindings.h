// The only room that includes nanobind. Each bind_ function adds one header's worth of the core to the module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace hotrow {
class Plan;
class Table;
}  // namespace hotrow

namespace hotrow::bindings {

namespace nb = nanobind;

// Arrays arrive without a copy from torch or numpy; a wrong dtype, device or layout is refused by nanobind before we
// run.
template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Memory that Python owns and has checked (torch's tensors, pinned or not), by its address.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_hashing(nb::module_& m);
void bind_store(nb::module_& m);
void bind_durable(nb::module_& m);
void bind_device(nb::module_& m, nb::class_<Table>& table, nb::class_<Plan>& plan);
void bind_serving(nb::module_& m);
void bind_ranks(nb::class_<Plan>& plan);
void bind_remote(nb::module_& m);
void bind_rooms(nb::module_& m);
void bind_ways(nb::module_& m);
void bind_exchange(nb::module_& m);

}  // namespace hotrow::bindings
