#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "HotRow's core: hashing and the row store. Use it through hotrow's Python classes.";
  hotrow::bindings::bind_hashing(m);
  hotrow::bindings::bind_store(m);
}
