#include "device/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace hotrow::device {
namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kNotReady = 600;          // CUDA_ERROR_NOT_READY

const Driver* test_driver = nullptr;

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("NVIDIA's driver has no ") + name + "; update it");
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("NVIDIA's driver (libcuda.so.1) is not on this machine");
  Driver found{};
  find(library, "cuCtxGetCurrent", found.context_get);
  find(library, "cuCtxSetCurrent", found.context_set);
  find(library, "cuEventCreate", found.event_create);
  find(library, "cuEventRecord", found.event_record);
  find(library, "cuEventSynchronize", found.event_wait);
  find(library, "cuEventQuery", found.event_query);
  find(library, "cuEventDestroy_v2", found.event_destroy);
  find(library, "cuStreamWaitEvent", found.stream_wait);
  find(library, "cuMemcpyHtoDAsync_v2", found.copy_to_device);
  find(library, "cuMemcpyDtoHAsync_v2", found.copy_to_host);
  find(library, "cuGraphInstantiateWithFlags", found.graph_instantiate);
  find(library, "cuGraphLaunch", found.graph_launch);
  find(library, "cuGraphExecDestroy", found.graph_destroy);
  find(library, "cuGetErrorName", found.error_name);
  return found;
}

}  // namespace

const Driver& driver() {
  if (test_driver) return *test_driver;
  static const Driver found = load();
  return found;
}

void set_driver_for_testing(const Driver* other) { test_driver = other; }

void check(int code, const char* what) {
  if (code == 0) return;
  const char* name = nullptr;
  driver().error_name(code, &name);
  throw std::runtime_error(std::string("the CUDA driver failed to ") + what + ": " +
                           (name ? name : std::to_string(code)));
}

Event::Event() { check(driver().event_create(&event_, kDisableTiming), "create an event"); }
bool Event::is_complete() {
  const int code = driver().event_query(event_);
  if (code != kNotReady) check(code, "query an event");
  return code != kNotReady;
}
Event::~Event() { driver().event_destroy(event_); }

Graph::Graph(Handle captured) { check(driver().graph_instantiate(&ready_, captured, 0), "instantiate a graph"); }
Graph::~Graph() { driver().graph_destroy(ready_); }

}  // namespace hotrow::device
