// A CUDA driver (libcuda.so.1) over runtime.cpp: the functions that Triton's launcher and HotRow's core call.
#include <cuda.h>

#include <atomic>
#include <cstring>

extern "C" {
void null_launch(void* stream);
void null_graph(void* stream);
int null_attribute(int which);
}

namespace {
std::atomic<long> next_handle = 0x900000;
int context;

template <class Handle>
CUresult make(Handle* out) {
  *out = reinterpret_cast<Handle>(next_handle += 16);
  return CUDA_SUCCESS;
}
}  // namespace

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* out, int number) { return *out = number, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice) {
  return *out = null_attribute(static_cast<int>(which)), CUDA_SUCCESS;  // the runtime's numbers are the same
}
CUresult cuCtxGetCurrent(CUcontext* out) { return *out = reinterpret_cast<CUcontext>(&context), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) { return cuCtxGetCurrent(out); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* out, CUlimit) { return *out = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* out, const void*) { return make(out); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char*) { return make(out); }
CUresult cuFuncGetAttribute(int* out, CUfunction_attribute which, CUfunction) {
  *out = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** out) { return *out = "an error of nothing", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** out) { return cuGetErrorString(CUDA_SUCCESS, out); }
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  return null_launch(config->hStream), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_INVALID_VALUE;
  return std::memcpy(out, &pointer, sizeof pointer), CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* out, unsigned) { return make(out); }
CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventDestroy_v2(CUevent) { return CUDA_SUCCESS; }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph, unsigned long long) { return make(out); }
CUresult cuGraphLaunch(CUgraphExec, CUstream stream) { return null_graph(stream), CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec) { return CUDA_SUCCESS; }
}
