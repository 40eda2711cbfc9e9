// The few CUDA driver calls that are made for every batch. The library is loaded when the first call is made, because
// the core is also built and installed on machines without CUDA. Handles are torch's (streams, captured graphs);
// torch's and the driver's are the same.
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
  int (*copy_to_device)(DeviceAddress, const void*, size_t, Handle stream);
  int (*copy_to_host)(void*, DeviceAddress, size_t, Handle stream);
  int (*graph_instantiate)(Handle*, Handle graph, unsigned long long);
  int (*graph_launch)(Handle, Handle stream);
  int (*graph_destroy)(Handle);
  int (*error_name)(int, const char**);
};

// Throws std::runtime_error if there is no driver.
const Driver& driver();

// For tests: replaces the driver (null: restores it). Requires: no other thread uses the driver.
void set_driver_for_testing(const Driver* other);

// Throws std::runtime_error with the driver's name for the error, unless `code` is success.
void check(int code, const char* what);

// A CUDA event without timing. An event that was never recorded counts as complete.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Handle stream) { check(driver().event_record(event_, stream), "record an event"); }
  void wait() { check(driver().event_wait(event_), "wait for an event"); }
  bool is_complete();
  void block_stream(Handle stream) { check(driver().stream_wait(stream, event_, 0), "make a stream wait"); }

 private:
  Handle event_ = nullptr;
};

// A captured graph (cudaGraph_t), instantiated. The captured graph must outlive it.
class Graph {
 public:
  explicit Graph(Handle captured);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(Handle stream) { check(driver().graph_launch(ready_, stream), "launch a graph"); }

 private:
  Handle ready_ = nullptr;
};

}  // namespace hotrow::device
