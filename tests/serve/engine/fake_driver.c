// A stand-in for the NVIDIA driver's library, with GPUs and faults from the environment:
//   FAKE_GPUS=name;name   FAKE_DRIVER=12080   FAKE_CUINIT=100   FAKE_CRASH=1
// The id of a GPU is 16 bytes of its number plus 1.
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

static const char* names(void) {
  const char* value = getenv("FAKE_GPUS");
  return value ? value : "";
}

int cuInit(unsigned flags) {
  if (number("FAKE_CRASH", 0)) abort();
  return flags ? 1 : number("FAKE_CUINIT", 0);
}

int cuDriverGetVersion(int* version) {
  *version = number("FAKE_DRIVER", 12080);
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = *names() != 0;
  for (const char* at = names(); *at; ++at) *count += *at == ';';
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

int cuDeviceGetName(char* name, int size, int device) {
  const char* at = names();
  while (device--) at = strchr(at, ';') + 1;
  size_t length = strcspn(at, ";");
  if (length >= (size_t)size) return 1;
  memcpy(name, at, length);
  name[length] = 0;
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char* id, int device) {
  memset(id, device + 1, 16);
  return 0;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)(device + 1) << 30;
  return 0;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == 803 ? "system has unsupported display driver / cuda driver combination" : 0;
  return code == 803 ? 0 : 1;
}
