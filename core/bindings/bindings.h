// The only folder that includes nanobind. Each bind_ function binds one header of the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

namespace hotrow {
class Plan;
class Table;
}  // namespace hotrow

namespace hotrow::bindings {

namespace nb = nanobind;

// Arrays of torch or numpy, without a copy. nanobind rejects a wrong dtype, device or layout.
template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Memory that Python owns and has checked (torch's tensors, pinned or not), by its address.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

void bind_hashing(nb::module_& m);
nb::class_<Table> bind_table(nb::module_& m);
void bind_table_storage(nb::class_<Table>& table);
void bind_log_files(nb::module_& m);
nb::class_<Plan> bind_plan(nb::module_& m);
void bind_plan_by_owner(nb::class_<Plan>& plan);
void bind_plan_ahead(nb::module_& m, nb::class_<Plan>& plan);
void bind_row_staging(nb::module_& m, nb::class_<Table>& table, nb::class_<Plan>& plan);
void bind_row_transfer(nb::module_& m);
void bind_graph_runner(nb::module_& m);
void bind_frames(nb::module_& m);
void bind_redis_replies(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_search(nb::module_& m);
void bind_exchange(nb::module_& m);
void bind_row_server(nb::module_& m);
void bind_row_client(nb::module_& m);
void bind_testing(nb::module_& m, nb::class_<Table>& table);

}  // namespace hotrow::bindings
