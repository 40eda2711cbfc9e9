#include "bindings/bindings.h"
#include "plan/plan.h"
#include "table/table.h"

NB_MODULE(_core, m) {
  m.doc() = "HotRow's core: hashing and the row store. Use it through hotrow's Python classes.";
  // Tables that are still referenced when the interpreter exits (a global model) are not leaks worth a warning.
  nanobind::set_leak_warnings(false);
  using namespace hotrow::bindings;
  bind_hashing(m);
  auto table = bind_table(m);
  bind_table_storage(table);
  bind_log_files(m);
  auto plan = bind_plan(m);
  bind_row_staging(m, table, plan);
  bind_plan_by_owner(plan);
  bind_plan_ahead(m, plan);
  bind_testing(m, table);
  bind_frames(m);
  bind_redis_replies(m);
  bind_graph_runner(m);
  bind_row_transfer(m);
  bind_attention(m);
  bind_search(m);
  bind_exchange(m);
  bind_row_server(m);
  bind_row_client(m);
}
