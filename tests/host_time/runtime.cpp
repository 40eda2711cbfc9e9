// A CUDA runtime without a GPU, for host_time.py: memory is the host's, kernels do nothing, and time passes.
//
// torch's CUDA build loads it in place of libcudart, so a training step makes all of its calls and computes nothing.
// Each stream has an instant until which it is busy: a launch or a copy moves it by a fixed time, an event records it,
// and a wait for either sleeps until then. A launch also takes the host the time of a call to the driver. Kernels leave
// zeros, which for HotRow means that no id is missing and every gradient is finite.
//
// Environment, all in nanoseconds: NULL_CALL (the host's, for a launch), NULL_KERNEL, NULL_PRODUCT (a matrix product),
// NULL_GRAPH and NULL_COPY (the device's).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

long setting(const char* name) {
  const char* value = getenv(name);
  return value ? atol(value) : 0;
}
const long kCall = setting("NULL_CALL"), kKernel = setting("NULL_KERNEL"), kProduct = setting("NULL_PRODUCT"),
           kGraph = setting("NULL_GRAPH"), kCopy = setting("NULL_COPY");
constexpr size_t kMoved = 1 << 20;  // larger copies are not made

long now() { return Clock::now().time_since_epoch().count(); }

void sleep_until(long instant) {
  constexpr long kWakeUp = 55'000;
  for (long left; (left = instant - now()) > 0;)
    if (left > kWakeUp) std::this_thread::sleep_for(std::chrono::nanoseconds(left - kWakeUp));
}

// --- streams ---

std::mutex mutex;
std::map<void*, long> busy_until;  // by stream
std::set<void*> capturing;
std::atomic<long> next_handle = 0x1000, busy = 0, calls[5];  // calls: launches, graphs, copies, waits, events

struct Event {
  long at = 0;
};

bool captures(void* stream) {
  std::lock_guard lock(mutex);
  return capturing.count(stream) > 0;
}

void work(void* stream, long takes) {
  std::lock_guard lock(mutex);
  if (capturing.count(stream)) return;
  long& end = busy_until[stream];
  end = std::max(end, now()) + takes;
  busy += takes;
}

long end_of(void* stream) {
  std::lock_guard lock(mutex);
  return std::max(busy_until[stream], now());
}

void call(int kind, void* stream, long takes) {
  ++calls[kind];
  sleep_until(now() + kCall);
  work(stream, takes);
}

// --- memory ---

struct Range {
  size_t bytes;
  cudaMemoryType kind;
};
std::map<char*, Range> ranges;

cudaError_t take(void** out, size_t bytes, cudaMemoryType kind) {
  bytes = std::max<size_t>(4096, (bytes + 4095) / 4096 * 4096);
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::lock_guard lock(mutex);
  ranges[static_cast<char*>(*out)] = {bytes, kind};
  return cudaSuccess;
}

cudaError_t give(void* memory) {
  std::lock_guard lock(mutex);
  if (const auto found = ranges.find(static_cast<char*>(memory)); found != ranges.end()) {
    munmap(memory, found->second.bytes);
    ranges.erase(found);
  }
  return cudaSuccess;
}

cudaMemoryType kind_of(const void* memory) {
  std::lock_guard lock(mutex);
  auto after = ranges.upper_bound(const_cast<char*>(static_cast<const char*>(memory)));
  if (after == ranges.begin()) return cudaMemoryTypeUnregistered;
  const auto& [begin, range] = *--after;
  return static_cast<const char*>(memory) < begin + range.bytes ? range.kind : cudaMemoryTypeUnregistered;
}

int attribute(int which) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrL2CacheSize:
      return 60 << 20;
    default:
      return 1;
  }
}

thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;

}  // namespace

extern "C" {
// --- for host_time.py and driver.cpp ---
void null_counts(long* out) {
  for (int i = 0; i < 5; ++i) out[i] = calls[i];
  out[5] = busy;
}
void null_launch(void* stream) { call(0, stream, kKernel); }
void null_product() { call(0, nullptr, kProduct); }
void null_graph(void* stream) { call(1, stream, kGraph); }
int null_attribute(int which) { return attribute(which); }

// --- kernels ---
void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(8, 8)); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return null_launch(stream), cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return null_launch(stream), cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return null_launch(stream), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return null_launch(config->stream), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {};
  out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->ptxVersion = out->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 4, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 4, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char memory[1 << 20];
  return *out = memory, cudaSuccess;
}

// --- the device ---
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr which, int) {
  return *out = attribute(static_cast<int>(which)), cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  std::memset(out, 0, sizeof *out);
  std::strcpy(out->name, "a GPU that does nothing");
  out->major = 9, out->totalGlobalMem = 140ull << 30, out->multiProcessorCount = 132, out->warpSize = 32;
  out->maxThreadsPerBlock = 1024, out->maxThreadsPerMultiProcessor = 2048, out->maxBlocksPerMultiProcessor = 32;
  out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = 232448, out->sharedMemPerMultiprocessor = 233472;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536, out->l2CacheSize = 60 << 20, out->textureAlignment = 512;
  out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
  out->unifiedAddressing = out->canMapHostMemory = 1, out->memoryBusWidth = 6144;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *free = 139ull << 30, *total = 140ull << 30, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? cudaSuccess : cudaErrorSymbolNotFound;
}
const char* cudaGetErrorName(cudaError_t) { return "an error of nothing"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of nothing"; }

// --- memory ---
cudaError_t cudaMalloc(void** out, size_t bytes) { return take(out, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return take(out, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return take(out, bytes, cudaMemoryTypeHost); }
cudaError_t cudaFree(void* memory) { return give(memory); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return give(memory); }
cudaError_t cudaFreeHost(void* memory) { return give(memory); }
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  std::lock_guard lock(mutex);
  return ranges[static_cast<char*>(memory)] = {bytes, cudaMemoryTypeHost}, cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  std::lock_guard lock(mutex);
  return ranges.erase(static_cast<char*>(memory)), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* memory) {
  *out = {};
  out->type = kind_of(memory);
  if (out->type != cudaMemoryTypeUnregistered) out->devicePointer = const_cast<void*>(memory);
  if (out->type == cudaMemoryTypeHost) out->hostPointer = const_cast<void*>(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  call(2, stream, kCopy);
  if (bytes <= kMoved && !captures(stream)) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t stream) {
  return call(2, stream, kCopy), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  call(0, stream, kKernel);
  if (bytes <= kMoved && !captures(stream)) std::memset(memory, value, bytes);
  return cudaSuccess;
}

// --- streams, events, graphs ---
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  return *out = reinterpret_cast<cudaStream_t>(next_handle += 16), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return end_of(stream) > now() ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return ++calls[3], sleep_until(end_of(stream)), cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  long last = 0;
  {
    std::lock_guard lock(mutex);
    for (const auto& [stream, end] : busy_until) last = std::max(last, end);
  }
  return sleep_until(last), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard lock(mutex);
  long& end = busy_until[stream];
  return end = std::max(end, reinterpret_cast<Event*>(event)->at), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  return *out = reinterpret_cast<cudaEvent_t>(new Event()), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return ++calls[4], reinterpret_cast<Event*>(event)->at = end_of(stream), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return reinterpret_cast<Event*>(event)->at > now() ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return ++calls[3], sleep_until(reinterpret_cast<Event*>(event)->at), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (reinterpret_cast<Event*>(to)->at - reinterpret_cast<Event*>(from)->at) / 1e6f;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard lock(mutex);
  return capturing.insert(stream), cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard lock(mutex);
  return capturing.erase(stream), *graph = reinterpret_cast<cudaGraph_t>(next_handle += 16), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = reinterpret_cast<unsigned long long>(stream) + 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  return *out = reinterpret_cast<cudaGraphExec_t>(next_handle += 16), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { return null_graph(stream), cudaSuccess; }
}
