// The CUDA driver calls that core/device/cuda_driver.cpp uses. They call back into Python (driver.py).
#include <stddef.h>

typedef void* Handle;
typedef unsigned long long Address;

static struct {
  int (*event_record)(Handle, Handle);
  int (*event_wait)(Handle);
  int (*event_query)(Handle);
  int (*event_destroy)(Handle);
  int (*stream_wait)(Handle, Handle);
  int (*copy_up)(Address, const void*, size_t, Handle);
  int (*copy_down)(void*, Address, size_t, Handle);
  int (*graph_launch)(Handle, Handle);
} calls;
static size_t events = 0;

void set_callbacks(void** functions) {
  for (size_t i = 0; i < sizeof calls / sizeof(void*); ++i) ((void**)&calls)[i] = functions[i];
}

int cuCtxGetCurrent(Handle* context) { return *context = (Handle)1, 0; }
int cuCtxSetCurrent(Handle context) { return context == (Handle)1 ? 0 : 201; }
int cuEventCreate(Handle* event, unsigned flags) {
  return *event = (Handle)__atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST), (void)flags, 0;
}
int cuEventRecord(Handle event, Handle stream) { return calls.event_record(event, stream); }
int cuEventSynchronize(Handle event) { return calls.event_wait(event); }
int cuEventQuery(Handle event) { return calls.event_query(event); }
int cuEventDestroy_v2(Handle event) { return calls.event_destroy(event); }
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
  return (void)flags, calls.stream_wait(stream, event);
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Handle stream) {
  return calls.copy_up(to, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Handle stream) {
  return calls.copy_down(to, from, bytes, stream);
}
int cuGraphInstantiateWithFlags(Handle* ready, Handle graph, unsigned long long flags) {
  return *ready = graph, (void)flags, 0;
}
int cuGraphLaunch(Handle graph, Handle stream) { return calls.graph_launch(graph, stream); }
int cuGraphExecDestroy(Handle graph) { return (void)graph, 0; }
int cuGetErrorName(int code, const char** name) { return *name = "a pretended error", (void)code, 0; }
