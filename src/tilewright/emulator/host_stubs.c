/* The CUDA runtime, driver and TVM-FFI entries that an exported CuTe DSL object calls, as far as it
   calls them: attributes of the chip are answered, a launch is handed to `emulator_launch`, errors
   to `emulator_error`. No device exists. */
#include <stdint.h>
#include <string.h>

enum { SHARED_MEMORY_PER_BLOCK_OPTIN = 97, MULTIPROCESSOR_COUNT = 16 };

int (*emulator_launch)(const void *config, const char *kernel, void **params);
void (*emulator_error)(const char *message);
int emulator_shared_bytes, emulator_multiprocessors;

typedef int (*init_fn)(void **library);
typedef int (*load_fn)(void **library, int device);

int cuda_dialect_init_library_once(void **slot, init_fn init, load_fn load, void *error) {
  (void)error;
  if (*slot) return 0;
  void *library = 0;
  int status = init(&library);
  if (!status) status = load(&library, 0);
  *slot = library;
  return status;
}
void cuda_dialect_unload_library_once(void **slot) { (void)slot; }

int _cudaLibraryLoadData(void **library) { *library = (void *)1; return 0; }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  *kernel = strdup(name); /* the name may stand on the caller's stack */
  return 0;
}
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { (void)device; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == SHARED_MEMORY_PER_BLOCK_OPTIN ? emulator_shared_bytes
         : attribute == MULTIPROCESSOR_COUNT ? emulator_multiprocessors : 0;
  return 0;
}
int _cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cudaLaunchKernelEx(const void *config, const char *kernel, void **params) {
  return emulator_launch(config, kernel, params);
}

void *TVMFFIEnvGetStream(void) { return 0; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void) { emulator_error("a CUDA call failed"); }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  emulator_error(kind);
  emulator_error(message);
}
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  emulator_error(kind);
  for (int32_t i = 0; i < count; i++) emulator_error(parts[i]);
}
