#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "HotRow's core: hashing and the row store. Use it through hotrow's Python classes.";
  // Tables that are still referenced when the interpreter exits (a global model) are not leaks worth a warning.
  nanobind::set_leak_warnings(false);
  hotrow::bindings::bind_hashing(m);
  hotrow::bindings::bind_store(m);
  hotrow::bindings::bind_serving(m);
  hotrow::bindings::bind_remote(m);
  hotrow::bindings::bind_rooms(m);
  hotrow::bindings::bind_ways(m);
  hotrow::bindings::bind_exchange(m);
}
