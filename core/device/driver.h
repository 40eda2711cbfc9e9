// The few calls of NVIDIA's driver that are made for every batch, found when first asked for: the core is built and
// installed where there is no CUDA. Handles are torch's own (streams, captured graphs), which are the driver's too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow::device {

using Handle = void*;
using DeviceAddress = unsigned long long;

struct Driver {
  int (*context_get)(Handle*);
  int (*context_set)(Handle);
  int (*event_create)(Handle*, unsigned);
  int (*event_record)(Handle, Handle stream);
  int (*event_wait)(Handle);
  int (*event_query)(Handle);
  int (*event_destroy)(Handle);
  int (*stream_wait)(Handle stream, Handle event, unsigned);
  int (*copy_up)(DeviceAddress, const void*, size_t, Handle stream);
  int (*copy_down)(void*, DeviceAddress, size_t, Handle stream);
  int (*graph_instantiate)(Handle*, Handle graph, unsigned long long);
  int (*graph_launch)(Handle, Handle stream);
  int (*graph_destroy)(Handle);
  int (*error_name)(int, const char**);
};

// Throws std::runtime_error where there is none.
const Driver& driver();

// Tests: this one in its place (null: the machine's again). Requires: nobody uses it meanwhile.
void use_driver(const Driver* other);

// Throws std::runtime_error, with the driver's name for it, unless `code` is success.
void check(int code, const char* what);

// An event without a clock. One that was never recorded counts as past.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Handle stream) { check(driver().event_record(event_, stream), "to record an event"); }
  void wait() { check(driver().event_wait(event_), "to wait for the device"); }
  bool past();
  void hold(Handle stream) { check(driver().stream_wait(stream, event_, 0), "to have a stream wait"); }

 private:
  Handle event_ = nullptr;
};

// A captured graph (cudaGraph_t), made ready to launch. What it was captured from must outlive it.
class Graph {
 public:
  explicit Graph(Handle captured);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(Handle stream) { check(driver().graph_launch(ready_, stream), "to launch a graph"); }

 private:
  Handle ready_ = nullptr;
};

}  // namespace hotrow::device
