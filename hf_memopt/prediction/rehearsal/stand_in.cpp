// A GPU without silicon: CUDA's runtime and driver, NVML, cuBLAS(Lt), cuDNN and NCCL for a process that has no GPU.
//
// It is preloaded (LD_PRELOAD) before the CUDA build of PyTorch, so that its functions are found before NVIDIA's own.
// - Device memory is memory of this process that nothing touches: 80 GiB of it cost the host nothing. cudaMalloc counts
//   it and refuses what a GPU of that size would refuse. A device pointer can therefore be read on the host, too.
// - Kernels are not run; products, convolutions and collectives are not computed. Small copies are done.
// - What torch's libraries ask for and this file lacks, library.py generates: functions that return 0 and count calls.
//
// One file serves every library: libcuda.so.1 and libnvidia-ml.so.1 are symbolic links to it, and the loader takes a
// link to a file that it has loaded for that file.

// These have other parameters in CUDA 12 than in 13. The header's declarations get other names, so that ours stand.
#include <cuda.h>
#if CUDA_VERSION >= 13000
#define cudaStreamGetCaptureInfo declared_cudaStreamGetCaptureInfo
#else
#define cudaStreamGetCaptureInfo_v2 declared_cudaStreamGetCaptureInfo_v2
#define cudaStreamGetCaptureInfo_v3 declared_cudaStreamGetCaptureInfo_v3
#endif
#include <cuda_runtime_api.h>
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
#undef cudaStreamGetCaptureInfo_v3
static_assert(CUDART_VERSION / 1000 == TORCH_CUDA / 1000, "structures differ between CUDA 12 and 13");

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

// In CUDA 12 these are macros for the newer form of a function; here each form is defined by its own name.
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPoint
#undef cudaGetDriverEntryPointByVersion
#undef cuGetProcAddress

#define API extern "C" __attribute__((visibility("default")))
// A function with a result that says "no error", in three families: its name, its parameters, what it does.
#define RUNTIME(name, parameters, ...) API cudaError_t name parameters { __VA_ARGS__; return cudaSuccess; }
#define DRIVER(name, parameters, ...) API CUresult name parameters { __VA_ARGS__; return CUDA_SUCCESS; }
#define LIBRARY(name, parameters, ...) API int name parameters { __VA_ARGS__; return 0; }

namespace {

// ---- What the GPU is like: from the environment, HF_MEMOPT_GPU_*

const char* setting(const char* name) {
  const char* text = getenv((std::string("HF_MEMOPT_GPU_") + name).c_str());
  return text && *text ? text : nullptr;
}

size_t number(const char* name, size_t otherwise) {
  const char* text = setting(name);
  return text ? strtoull(text, nullptr, 0) : otherwise;
}

struct Gpu {
  size_t memory = number("MEMORY", size_t(12) << 30);
  size_t context = number("CONTEXT", 0);              // what CUDA itself holds of it
  int count = number("COUNT", 1);
  int capability = number("CAPABILITY", 86);          // 86 for 8.6
  int multiprocessors = number("PROCESSORS", 28);
  size_t copy_limit = number("COPY_LIMIT", 1 << 20);  // larger copies are left out
  bool lazy = number("LAZY", 0);                      // see "streams and events"
  std::string name = setting("NAME") ? setting("NAME") : "Stand-in GPU";
};

const Gpu& gpu() { static Gpu one; return one; }

// The most shared memory of a block, by the CUDA programming guide. Triton takes every kernel for too large without it.
int shared_memory_of_a_block() {
  switch (gpu().capability) {
    case 70: return 96 << 10;
    case 75: return 64 << 10;
    case 80: case 87: return 163 << 10;
    case 90: case 100: case 103: return 227 << 10;
    default: return 99 << 10;
  }
}

int threads_of_a_multiprocessor() {
  switch (gpu().capability) {
    case 75: return 1024;
    case 70: case 80: case 90: case 100: case 103: return 2048;
    default: return 1536;
  }
}

// cudaDeviceAttr and CUdevice_attribute have the same numbers.
int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return shared_memory_of_a_block();
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared_memory_of_a_block() + 1024;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return gpu().multiprocessors;
    case cudaDevAttrComputeCapabilityMajor: return gpu().capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return gpu().capability % 10;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return threads_of_a_multiprocessor();
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrL2CacheSize: return 4 << 20;
    case cudaDevAttrClockRate: return 1800000;
    case cudaDevAttrMemoryClockRate: return 7500000;
    case cudaDevAttrGlobalMemoryBusWidth: return 192;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrConcurrentKernels:
    case cudaDevAttrManagedMemory: case cudaDevAttrCanMapHostMemory: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED: return 1;  // torch's expandable segments
    default: return 0;
  }
}

// ---- Memory: who holds what, and how much is left

const int MOST_GPUS = 16;
const size_t GRAIN = 2 << 20;  // pages of a GPU: what cudaMalloc takes is a multiple
const size_t PAGE = 4096;      // of the host
const int MANAGED = -1;        // memory of the host that the GPU reads, too (paged optimizers): not counted

struct Block { size_t size; int device; };
std::mutex lock;  // of everything below but the atomic ones
#define LOCKED std::lock_guard<std::mutex> guard(lock)
std::map<uintptr_t, Block> device_blocks, host_blocks;  // by their first address; of the host those that are pinned
std::map<unsigned long long, Block> physical;           // of expandable segments, by their handle
size_t used[MOST_GPUS], peak[MOST_GPUS], pinned, pinned_peak;
std::atomic<unsigned long long> launches{0}, refused_allocations{0};
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }
size_t rounded(size_t n, size_t grain) { return n ? (n + grain - 1) / grain * grain : grain; }

// Addresses only grow, as those of a GPU do: of two free blocks of one size, torch's allocator takes the lower one.
void* addresses(size_t n) {
  static std::atomic<uintptr_t> next{uintptr_t(0x7f) << 36};
  void* hint = (void*)next.fetch_add(rounded(n, GRAIN) + GRAIN);
  void* p = mmap(hint, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) return p;
  fprintf(stderr, "hf_memopt.prediction.rehearsal: the host gives no addresses; expected no `ulimit -v` and "
                  "vm.overcommit_memory other than 2\n");
  return nullptr;
}

bool take(size_t n, int device) {  // under the lock
  if (used[device] + n + gpu().context > gpu().memory) return refused_allocations++, false;
  used[device] += n;
  peak[device] = std::max(peak[device], used[device]);
  return true;
}

const Block* block_around(const std::map<uintptr_t, Block>& blocks, const void* p) {  // under the lock
  auto it = blocks.upper_bound((uintptr_t)p);
  if (it == blocks.begin()) return nullptr;
  --it;
  return (uintptr_t)p < it->first + it->second.size ? &it->second : nullptr;
}

enum class Place { device, managed, pinned, host };
Place place_of(const void* p, int* device = nullptr) {
  LOCKED;
  const Block* block = block_around(device_blocks, p);
  if (!block) return block_around(host_blocks, p) ? Place::pinned : Place::host;
  if (device) *device = block->device == MANAGED ? current_device : block->device;
  return block->device == MANAGED ? Place::managed : Place::device;
}

// Large copies are left out, so that weights never touch a page of the host. What decides shapes and flow is small.
void copy(void* to, const void* from, size_t n) {
  if (n <= gpu().copy_limit || (place_of(to) != Place::device && place_of(from) != Place::device)) memmove(to, from, n);
}
void fill(void* to, int value, size_t n) {
  if (n <= gpu().copy_limit) memset(to, value, n);
}

void pin(void* p, size_t n) {
  LOCKED;
  host_blocks[(uintptr_t)p] = {n, current_device};
  pinned_peak = std::max(pinned_peak, pinned += n);
}
void unpin(void* p, bool unmap) {
  LOCKED;
  auto it = host_blocks.find((uintptr_t)p);
  if (it == host_blocks.end()) return;
  pinned -= it->second.size;
  if (unmap) munmap(p, it->second.size);
  host_blocks.erase(it);
}

// Streams, events, modules, descriptors: numbers that nothing looks behind.
std::atomic<uintptr_t> next_handle{0x10000};
template <class Handle> int new_handle(Handle* made) { *made = (Handle)(next_handle += 16); return 0; }

// A function that makes something by its first parameter, whatever the others are.
#define MAKES(Result, name, Handle, ...) \
  API Result name(Handle* made, ##__VA_ARGS__) { return (Result)new_handle(made); }

const char* error_text(int error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorStreamCaptureUnsupported)
    return "a rehearsal cannot record CUDA graphs; leave out torch.cuda.graph and mode=\"reduce-overhead\"";
  return error ? "an error of the GPU that stands in" : "no error";
}

}  // namespace

// ---- For Python (stand_in.py)

API size_t hf_memopt_gpu_used_bytes(int device) { return used[device]; }
API size_t hf_memopt_gpu_peak_bytes(int device) { return peak[device]; }
API size_t hf_memopt_gpu_pinned_bytes() { return pinned; }
API size_t hf_memopt_gpu_pinned_peak_bytes() { return pinned_peak; }
API unsigned long long hf_memopt_gpu_launches() { return launches; }
API unsigned long long hf_memopt_gpu_refused() { return refused_allocations; }

// ---- Runtime: devices

RUNTIME(cudaGetDeviceCount, (int* n), *n = gpu().count)
RUNTIME(cudaGetDevice, (int* device), *device = current_device)
RUNTIME(cudaSetDevice, (int device),
        if (device < 0 || device >= gpu().count) return fail(cudaErrorInvalidDevice); current_device = device)
RUNTIME(cudaDriverGetVersion, (int* version), *version = TORCH_CUDA)
RUNTIME(cudaRuntimeGetVersion, (int* version), *version = TORCH_CUDA)
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t error) { return error_text(error); }
API const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaError" : "cudaSuccess"; }

// CUDA 12 asks by the name with _v2, CUDA 13 by the one without: its structure is another one. Which one this is, the
// headers say, and they are those of the installed torch.
static cudaError_t properties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", gpu().name.c_str());
  p->uuid.bytes[15] = p->pciBusID = 1 + device;
  p->totalGlobalMem = gpu().memory;
  p->major = gpu().capability / 10;
  p->minor = gpu().capability % 10;
  p->multiProcessorCount = gpu().multiprocessors;
  p->maxThreadsPerMultiProcessor = threads_of_a_multiprocessor();
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = shared_memory_of_a_block();
  p->sharedMemPerMultiprocessor = shared_memory_of_a_block() + 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = p->memPitch = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxBlocksPerMultiProcessor = 16;
  p->warpSize = 32;
  p->l2CacheSize = 4 << 20;
  p->textureAlignment = 512;
  p->memoryBusWidth = 192;
  p->asyncEngineCount = 2;
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->managedMemory = 1;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) { return properties(p, device); }
API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* p, int device) { return properties(p, device); }
RUNTIME(cudaDeviceGetAttribute, (int* value, cudaDeviceAttr which, int), *value = attribute(which))
RUNTIME(cudaDeviceGetPCIBusId, (char* text, int n, int device), snprintf(text, n, "0000:%02x:00.0", device + 1))
RUNTIME(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), *least = 0; *greatest = -5)
RUNTIME(cudaDeviceCanAccessPeer, (int* can, int, int), *can = 0)

// ---- Runtime: memory

RUNTIME(cudaMemGetInfo, (size_t* free_bytes, size_t* total),
        LOCKED; *total = gpu().memory; *free_bytes = *total - used[current_device] - gpu().context)
API cudaError_t cudaMalloc(void** p, size_t n) {
  LOCKED;
  size_t size = rounded(n, GRAIN);
  *p = nullptr;
  if (!take(size, current_device)) return fail(cudaErrorMemoryAllocation);
  if (!(*p = addresses(size))) return used[current_device] -= size, fail(cudaErrorMemoryAllocation);
  device_blocks[(uintptr_t)*p] = {size, current_device};
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  LOCKED;
  auto it = device_blocks.find((uintptr_t)p);
  if (it == device_blocks.end()) return fail(cudaErrorInvalidValue);
  munmap(p, it->second.size);
  if (it->second.device != MANAGED) used[it->second.device] -= it->second.size;
  device_blocks.erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
RUNTIME(cudaMallocManaged, (void** p, size_t n, unsigned),
        if (!(*p = addresses(rounded(n, GRAIN)))) return fail(cudaErrorMemoryAllocation);
        LOCKED; device_blocks[(uintptr_t)*p] = {rounded(n, GRAIN), MANAGED})
RUNTIME(cudaHostAlloc, (void** p, size_t n, unsigned),
        if (!(*p = addresses(rounded(n, PAGE)))) return fail(cudaErrorMemoryAllocation); pin(*p, rounded(n, PAGE)))
API cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
RUNTIME(cudaFreeHost, (void* p), unpin(p, true))
RUNTIME(cudaHostRegister, (void* p, size_t n, unsigned), pin(p, n))
RUNTIME(cudaHostUnregister, (void* p), unpin(p, false))
RUNTIME(cudaHostGetDevicePointer, (void** device, void* host, unsigned), *device = host)
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  int device = -1;
  memset(a, 0, sizeof *a);
  Place place = place_of(p, &device);
  a->type = place == Place::device ? cudaMemoryTypeDevice : place == Place::managed ? cudaMemoryTypeManaged
          : place == Place::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = place == Place::pinned ? current_device : device;
  if (place != Place::host) a->devicePointer = (void*)p;
  if (place != Place::device) a->hostPointer = (void*)p;
  return cudaSuccess;
}
RUNTIME(cudaMemcpy, (void* to, const void* from, size_t n, cudaMemcpyKind), copy(to, from, n))
RUNTIME(cudaMemcpyAsync, (void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t), copy(to, from, n))
RUNTIME(cudaMemcpyPeerAsync, (void* to, int, const void* from, int, size_t n, cudaStream_t), copy(to, from, n))
RUNTIME(cudaMemcpy2DAsync, (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            cudaMemcpyKind, cudaStream_t),
        if (width * height <= gpu().copy_limit) for (size_t i = 0; i < height; i++)
          memmove((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width))
RUNTIME(cudaMemset, (void* to, int value, size_t n), fill(to, value, n))
RUNTIME(cudaMemsetAsync, (void* to, int value, size_t n, cudaStream_t), fill(to, value, n))

// ---- Runtime: streams and events
//
// All work is done at once, or with HF_MEMOPT_GPU_LAZY=1 only when the host waits for it: an infinitely slow GPU. What
// record_stream and prefetching hold is least with the one and most with the other. A real GPU lies between.

namespace {
std::atomic<unsigned long long> work_recorded{0}, work_done{0};  // numbers of recorded events
std::map<uintptr_t, unsigned long long> recorded;                // by event
unsigned long long recorded_at(const void* event) { LOCKED; return recorded[(uintptr_t)event]; }
cudaError_t wait_for(unsigned long long work) {
  unsigned long long seen = work_done;
  while (seen < work && !work_done.compare_exchange_weak(seen, work)) continue;
  return cudaSuccess;
}
cudaError_t ready(unsigned long long work) { return gpu().lazy && work > work_done ? cudaErrorNotReady : cudaSuccess; }
void not_captured(cudaStreamCaptureStatus* status, unsigned long long* id) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
}
}  // namespace

MAKES(cudaError_t, cudaStreamCreate, cudaStream_t)
MAKES(cudaError_t, cudaStreamCreateWithFlags, cudaStream_t, unsigned)
MAKES(cudaError_t, cudaStreamCreateWithPriority, cudaStream_t, unsigned, int)
MAKES(cudaError_t, cudaEventCreate, cudaEvent_t)
MAKES(cudaError_t, cudaEventCreateWithFlags, cudaEvent_t, unsigned)
RUNTIME(cudaStreamGetPriority, (cudaStream_t, int* priority), *priority = 0)
RUNTIME(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus* s), not_captured(s, nullptr))
// Further results are only read while a stream is captured.
using CaptureStatus = cudaStreamCaptureStatus;
RUNTIME(cudaStreamGetCaptureInfo, (cudaStream_t, CaptureStatus* s, unsigned long long* id), not_captured(s, id))
RUNTIME(cudaStreamGetCaptureInfo_v2, (cudaStream_t, CaptureStatus* s, unsigned long long* id), not_captured(s, id))
RUNTIME(cudaStreamGetCaptureInfo_v3, (cudaStream_t, CaptureStatus* s, unsigned long long* id), not_captured(s, id))
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  fprintf(stderr, "hf_memopt.prediction.rehearsal: %s\n", error_text(cudaErrorStreamCaptureUnsupported));
  return fail(cudaErrorStreamCaptureUnsupported);
}
RUNTIME(cudaEventRecord, (cudaEvent_t event, cudaStream_t),
        if (!gpu().lazy) return cudaSuccess; LOCKED; recorded[(uintptr_t)event] = ++work_recorded)
RUNTIME(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned), cudaEventRecord(event, stream))
API cudaError_t cudaEventQuery(cudaEvent_t event) { return ready(recorded_at(event)); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for(recorded_at(event)); }
API cudaError_t cudaStreamQuery(cudaStream_t) { return ready(work_recorded); }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait_for(work_recorded); }
API cudaError_t cudaDeviceSynchronize() { return wait_for(work_recorded); }
RUNTIME(cudaEventElapsedTime, (float* milliseconds, cudaEvent_t, cudaEvent_t), *milliseconds = 1)  // never 0, a divisor

// ---- Runtime: kernels, which are counted

RUNTIME(cudaLaunchKernel, (const void*, dim3, dim3, void**, size_t, cudaStream_t), launches++)
RUNTIME(cudaLaunchKernelExC, (const cudaLaunchConfig_t*, const void*, void**), launches++)
RUNTIME(cudaLaunchCooperativeKernel, (const void*, dim3, dim3, void**, size_t, cudaStream_t), launches++)
RUNTIME(__cudaLaunchKernel, (cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t), launches++)
// torch's wheels have code of these; a GPU runs the newest that is not newer than itself: 8.9 that of 8.6.
int compiled_capability() {
  int found = 50;
  for (int compiled : {60, 70, 75, 80, 86, 90, 100, 120}) if (compiled <= gpu().capability) found = compiled;
  return found;
}
RUNTIME(cudaFuncGetAttributes, (cudaFuncAttributes* a, const void*), memset(a, 0, sizeof *a);
        a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->maxDynamicSharedSizeBytes = 48 << 10;
        a->ptxVersion = a->binaryVersion = compiled_capability())
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int* n, const void*, int, size_t), *n = 2)
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int* n, const void*, int, size_t, unsigned), *n = 2)
RUNTIME(cudaOccupancyAvailableDynamicSMemPerBlock, (size_t* n, const void*, int, int), *n = 48 << 10)
RUNTIME(cudaGetSymbolAddress, (void** p, const void*), static char page[1 << 16]; *p = page)
MAKES(cudaError_t, cudaGetFuncBySymbol, cudaFunction_t, const void*)

// What nvcc writes around `kernel<<<grid, block>>>()`: pushed by the caller, popped by the kernel's own function.
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration;
LIBRARY(__cudaPushCallConfiguration, (dim3 grid, dim3 block, size_t shared, void* stream),
        configuration = {grid, block, shared, stream})
RUNTIME(__cudaPopCallConfiguration, (dim3* grid, dim3* block, size_t* shared, void** stream),
        *grid = configuration.grid; *block = configuration.block; *shared = configuration.shared;
        *stream = configuration.stream)
API void** __cudaRegisterFatBinary(void*) { static void* one[64]; return one; }
RUNTIME(__cudaGetKernel, (cudaKernel_t* kernel, const void* function), *kernel = (cudaKernel_t)function)
API char __cudaInitModule(void**) { return 1; }

// ---- Driver: asked by name (cudaGetDriverEntryPoint, dlsym) by torch, by linking by Triton's launchers

DRIVER(cuDriverGetVersion, (int* version), *version = TORCH_CUDA)
DRIVER(cuDeviceGetCount, (int* n), *n = gpu().count)
DRIVER(cuDeviceGet, (CUdevice* device, int i), *device = i)
DRIVER(cuDeviceGetName, (char* text, int n, CUdevice), snprintf(text, n, "%s", gpu().name.c_str()))
DRIVER(cuDeviceTotalMem_v2, (size_t* n, CUdevice), *n = gpu().memory)
DRIVER(cuMemGetInfo_v2, (size_t* free_bytes, size_t* total), cudaMemGetInfo(free_bytes, total))
DRIVER(cuDeviceGetAttribute, (int* value, CUdevice_attribute which, CUdevice), *value = attribute(which))
const CUcontext THE_CONTEXT = (CUcontext)0x1234;
DRIVER(cuCtxGetCurrent, (CUcontext* context), *context = THE_CONTEXT)
DRIVER(cuDevicePrimaryCtxRetain, (CUcontext* context, CUdevice), *context = THE_CONTEXT)
DRIVER(cuCtxGetDevice, (CUdevice* device), *device = current_device)
DRIVER(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* active),
        *flags = 0; *active = used[device] > 0)
DRIVER(cuCtxGetLimit, (size_t* n, CUlimit), *n = 0)
DRIVER(cuGetErrorString, (CUresult error, const char** text), *text = error_text(error))  // numbers as the runtime's
DRIVER(cuGetErrorName, (CUresult, const char** text), *text = "CUDA_ERROR")
MAKES(CUresult, cuModuleLoadData, CUmodule, const void*)
MAKES(CUresult, cuModuleLoadDataEx, CUmodule, const void*, unsigned, CUjit_option*, void**)
MAKES(CUresult, cuModuleLoad, CUmodule, const char*)
MAKES(CUresult, cuModuleGetFunction, CUfunction, CUmodule, const char*)
MAKES(CUresult, cuLibraryLoadData, CUlibrary, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
      unsigned)
MAKES(CUresult, cuLibraryGetKernel, CUkernel, CUlibrary, const char*)
MAKES(CUresult, cuKernelGetFunction, CUfunction, CUkernel)
DRIVER(cuFuncGetAttribute, (int* value, CUfunction_attribute which, CUfunction),
        *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
DRIVER(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void**, void**), launches++)
DRIVER(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void**, void**), launches++)
DRIVER(cuOccupancyMaxActiveClusters, (int* n, CUfunction, const CUlaunchConfig*), *n = 8)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* n, CUfunction, int, size_t), *n = 2)
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr p) {
  int type = place_of((void*)p) == Place::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = p;  // Triton asks it of each argument
  else *(int*)value = which != CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 0 : type;
  return CUDA_SUCCESS;
}

// ---- Driver: virtual memory (expandable segments). Addresses are reserved without being counted; what is created is.

DRIVER(cuMemGetAllocationGranularity, (size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags),
        *n = GRAIN)
DRIVER(cuMemAddressReserve, (CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long),
       if (!(*p = (CUdeviceptr)addresses(n))) return CUDA_ERROR_OUT_OF_MEMORY;
       LOCKED; device_blocks[*p] = {n, current_device})
DRIVER(cuMemAddressFree, (CUdeviceptr p, size_t n),
        LOCKED; device_blocks.erase((uintptr_t)p); munmap((void*)p, n))
DRIVER(cuMemCreate, (CUmemGenericAllocationHandle* made, size_t n, const CUmemAllocationProp* prop, unsigned long long),
       LOCKED; int device = prop->location.id; if (!take(n, device)) return CUDA_ERROR_OUT_OF_MEMORY;
       new_handle(made); physical[*made] = {n, device})
DRIVER(cuMemRelease, (CUmemGenericAllocationHandle handle),
       LOCKED; used[physical[handle].device] -= physical[handle].size; physical.erase(handle))
DRIVER(cuMemUnmap, (CUdeviceptr p, size_t n), madvise((void*)p, n, MADV_DONTNEED))  // the host gets its pages back

// torch asks for cuMemCreate and means cuMemCreate, for cuMemGetInfo and means cuMemGetInfo_v2: the newer form first.
static bool find_function(const char* name, void** found) {
  *found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  return *found || (*found = dlsym(RTLD_DEFAULT, name));
}
using EntryPoint = cudaDriverEntryPointQueryResult;
static void entry_point(const char* name, void** found, EntryPoint* result) {
  bool there = find_function(name, found);
  if (result) *result = there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
}
RUNTIME(cudaGetDriverEntryPoint, (const char* name, void** found, unsigned long long, EntryPoint* result),
        entry_point(name, found, result))
RUNTIME(cudaGetDriverEntryPointByVersion, (const char* name, void** found, unsigned, unsigned long long, EntryPoint* r),
        entry_point(name, found, r))
DRIVER(cuGetProcAddress, (const char* name, void** found, int, cuuint64_t),
       if (!find_function(name, found)) return CUDA_ERROR_NOT_FOUND)
DRIVER(cuGetProcAddress_v2, (const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* result),
       if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
       if (!find_function(name, found)) return CUDA_ERROR_NOT_FOUND)

// ---- cuBLAS and cuBLASLt: products are not computed. Their workspaces are allocated by torch itself.

LIBRARY(cublasGetMathMode, (void*, int* mode), *mode = 0)
LIBRARY(cublasGetPointerMode_v2, (void*, int* mode), *mode = 0)
LIBRARY(cublasGetStream_v2, (void*, void** stream), *stream = nullptr)
LIBRARY(cublasGetVersion_v2, (void*, int* version), *version = TORCH_CUDA * 10)
struct Heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
LIBRARY(cublasLtMatmulAlgoGetHeuristic,  // one algorithm, which needs no workspace
        (void*, void*, void*, void*, void*, void*, void*, int, Heuristic* result, int* found),
        memset(result, 0, sizeof *result); *found = 1)

// ---- cuDNN: every operation has one engine, which needs HF_MEMOPT_GPU_CUDNN_WORKSPACE bytes (0)

const int RNN_REFUSED = 5000;  // CUDNN_STATUS_EXECUTION_FAILED: the one error whose text torch quotes as it is
API const char* cudnnGetErrorString(int status) {
  return status == RNN_REFUSED
             ? "a rehearsal has no recurrent layers of cuDNN; call torch.backends.cudnn.enabled = False before them"
             : "an error of the GPU that stands in";
}
API void cudnnGetLastErrorString(char* text, size_t n) { snprintf(text, n, "%s", ""); }
LIBRARY(cudnnCreateRNNDescriptor, (void**),
        fprintf(stderr, "hf_memopt.prediction.rehearsal: %s\n", cudnnGetErrorString(RNN_REFUSED)); return RNN_REFUSED)
API int cudnnBackendCreateDescriptor(int, void** made) { return new_handle(made); }
API int cudnnBackendGetAttribute(void*, int name, int type, int64_t asked, int64_t* count, void* values) {
  const int BACKEND_DESCRIPTOR = 15;                                    // CUDNN_TYPE_*
  const int ENGINE = 300, RESULTS = 202, WORKSPACE = 403, ENGINES = 802;  // CUDNN_ATTR_*
  const int NOTES = 1302, KNOBS = 1303, BEHAVIOR = 1305;                // of an engine
  bool is_list = name == NOTES || name == BEHAVIOR || name == KNOBS;
  bool is_descriptor = type == BACKEND_DESCRIPTOR;  // the caller made it: nothing to write
  if (count) *count = is_list || (is_descriptor && name != RESULTS && name != ENGINE) ? 0 : 1;
  if (!is_list && !is_descriptor && values && asked > 0)
    *(int64_t*)values = name == WORKSPACE ? number("CUDNN_WORKSPACE", 0) : name == ENGINES ? 1 : 0;
  return 0;
}
LIBRARY(cudnnDropoutGetStatesSize, (void*, size_t* n), *n = 1 << 20)

// ---- NCCL: one rank alone, as if the others held what it holds

namespace {
struct Communicator { int ranks, rank; };
struct UniqueId { char bytes[128]; };
size_t bytes_of(size_t n, int type) {  // by ncclDataType_t
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return n * (type >= 0 && type < 12 ? sizes[type] : 1);
}
int joined(void** made, int ranks, int rank) { *made = new Communicator{ranks, rank}; return 0; }
}  // namespace
LIBRARY(ncclGetUniqueId, (UniqueId* id), memset(id, 7, sizeof *id))
API const char* ncclGetLastError(void*) { return ""; }
API int ncclCommInitRank(void** made, int n, UniqueId, int rank) { return joined(made, n, rank); }
API int ncclCommInitRankConfig(void** made, int n, UniqueId, int rank, void*) { return joined(made, n, rank); }
API int ncclCommInitRankScalable(void** made, int n, int rank, int, UniqueId*, void*) { return joined(made, n, rank); }
API int ncclCommSplit(Communicator* of, int, int, void** made, void*) { return joined(made, of->ranks, of->rank); }
LIBRARY(ncclCommCount, (Communicator* of, int* n), *n = of->ranks)
LIBRARY(ncclCommUserRank, (Communicator* of, int* rank), *rank = of->rank)
LIBRARY(ncclCommGetAsyncError, (void*, int* error), *error = 0)
LIBRARY(ncclAllReduce, (const void* from, void* to, size_t n, int type, int, void*, void*),
        copy(to, from, bytes_of(n, type)))  // the mean of equal ones
LIBRARY(ncclReduce, (const void* from, void* to, size_t n, int type, int, int, void*, void*),
        copy(to, from, bytes_of(n, type)))
LIBRARY(ncclBroadcast, (const void* from, void* to, size_t n, int type, int, void*, void*),
        copy(to, from, bytes_of(n, type)))
LIBRARY(ncclAllGather, (const void* from, char* to, size_t n, int type, Communicator* of, void*),
        size_t part = bytes_of(n, type); if (part * of->ranks <= gpu().copy_limit)
          for (int i = 0; i < of->ranks; i++) memmove(to + i * part, from, part))
LIBRARY(ncclReduceScatter, (const char* from, void* to, size_t n, int type, int, Communicator* of, void*),
        copy(to, from + of->rank * bytes_of(n, type), bytes_of(n, type)))
API int ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n); }
API int ncclMemFree(void* p) { return cudaFree(p); }

// ---- NVML: what nvidia-smi and pynvml read. A handle is the number of the GPU plus one.

namespace {
struct Memory { unsigned long long total, free, used; };
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
const int INSUFFICIENT_SIZE = 7, NOT_FOUND = 6, INVALID_ARGUMENT = 2;  // NVML_ERROR_*
int index_of(void* handle) { return int((uintptr_t)handle - 1); }
unsigned long long held(void* handle) {  // the context comes with the first block
  size_t n = used[index_of(handle)];
  return n ? n + gpu().context : 0;
}
int processes(void* handle, unsigned* n, Process* process) {
  unsigned room = *n;
  *n = held(handle) ? 1 : 0;
  if (*n > room) return INSUFFICIENT_SIZE;
  if (*n) *process = {(unsigned)getpid(), held(handle), ~0u, ~0u};
  return 0;
}
}  // namespace
API const char* nvmlErrorString(int) { return "an error of the GPU that stands in"; }
LIBRARY(nvmlSystemGetDriverVersion, (char* text, unsigned n), snprintf(text, n, "580.00"))
LIBRARY(nvmlSystemGetCudaDriverVersion_v2, (int* version), *version = TORCH_CUDA)
LIBRARY(nvmlDeviceGetCount_v2, (unsigned* n), *n = gpu().count)
LIBRARY(nvmlDeviceGetHandleByIndex_v2, (unsigned i, void** handle),
        if (i >= (unsigned)gpu().count) return INVALID_ARGUMENT; *handle = (void*)(uintptr_t)(i + 1))
LIBRARY(nvmlDeviceGetHandleByUUID, (const char* text, void** handle),  // GPU-...; a MIG-... is a part of a GPU
        if (strncmp(text, "MIG", 3) == 0) return NOT_FOUND; *handle = (void*)(uintptr_t)strtoul(text + 38, 0, 16))
LIBRARY(nvmlDeviceGetHandleByPciBusId_v2, (const char*, void** handle), *handle = (void*)1)
LIBRARY(nvmlDeviceGetIndex, (void* handle, unsigned* i), *i = index_of(handle))
LIBRARY(nvmlDeviceGetName, (void*, char* text, unsigned n), snprintf(text, n, "%s", gpu().name.c_str()))
LIBRARY(nvmlDeviceGetUUID, (void* handle, char* text, unsigned n),
        snprintf(text, n, "GPU-00000000-0000-0000-0000-0000000000%02x", index_of(handle) + 1))
LIBRARY(nvmlDeviceGetMemoryInfo, (void* handle, Memory* memory),
        *memory = {gpu().memory, gpu().memory - held(handle), held(handle)})
LIBRARY(nvmlDeviceGetMemoryInfo_v2, (void* handle, Memory2* memory),
        *memory = {memory->version, gpu().memory, 0, gpu().memory - held(handle), held(handle)})
API int nvmlDeviceGetComputeRunningProcesses(void* d, unsigned* n, Process* p) { return processes(d, n, p); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void* d, unsigned* n, Process* p) { return processes(d, n, p); }
LIBRARY(nvmlDeviceGetGraphicsRunningProcesses_v3, (void*, unsigned* n, Process*), *n = 0)
LIBRARY(nvmlDeviceGetCudaComputeCapability, (void*, int* major, int* minor),
        *major = gpu().capability / 10; *minor = gpu().capability % 10)
