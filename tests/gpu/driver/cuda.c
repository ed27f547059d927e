/* A CUDA runtime without a GPU: device memory is host memory, kernels do nothing, and every call is counted.

   With it the CUDA provider of onnxruntime-gpu opens a graph on any machine, assigns its nodes, and records and replays CUDA graphs. What
   kernels compute is not known, but which of them are launched, and what is copied, allocated and waited for, is. */

#include <stdlib.h>
#include <string.h>
#include "cuda_runtime_api.h"
#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime

enum { LAUNCHES, TO_DEVICE, TO_HOST, ON_DEVICE, WAITS, ALLOCATIONS, REPLAYS, RECORDINGS, RECORDED, COPIED_WHILE_RECORDING, N_COUNTS };
static long counts[N_COUNTS];
static int recording;
static struct { char *begin; size_t size; } blocks[1 << 16];
static int n_blocks;

void stub_counts(long *out) { memcpy(out, counts, sizeof counts); }
void stub_launch(void) { counts[LAUNCHES]++; counts[RECORDED] += recording; }

/* The device: an H100, so that every kernel of the release is chosen as there. */

cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaSetDevice(int device) { return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "no GPU");
    p->totalGlobalMem = 8ul << 30;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = 2048;
    p->l2CacheSize = 50 << 20;
    p->concurrentKernels = p->unifiedAddressing = 1;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 1;
    }
    return 0;
}

/* Memory */

static cudaError_t allocate(void **p, size_t size) {
    if (posix_memalign(p, 256, size ? size : 256)) return cudaErrorMemoryAllocation;
    memset(*p, 0, size);
    return 0;
}
static cudaError_t allocate_on_device(void **p, size_t size) {
    cudaError_t error = allocate(p, size);
    blocks[n_blocks].begin = *p;
    blocks[n_blocks++].size = size;
    counts[ALLOCATIONS]++;
    return error;
}
static cudaError_t release(void *p) {
    for (int i = n_blocks - 1; i >= 0; i--)
        if (blocks[i].begin == p) { blocks[i].begin = 0; break; }
    free(p);
    return 0;
}
static void copied(enum cudaMemcpyKind kind) {
    counts[kind == cudaMemcpyHostToDevice ? TO_DEVICE : kind == cudaMemcpyDeviceToHost ? TO_HOST : ON_DEVICE]++;
    counts[COPIED_WHILE_RECORDING] += recording && kind != cudaMemcpyDeviceToDevice;
}
cudaError_t cudaMalloc(void **p, size_t size) { return allocate_on_device(p, size); }
cudaError_t cudaMallocFromPoolAsync(void **p, size_t size, cudaMemPool_t pool, cudaStream_t s) { return allocate_on_device(p, size); }
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
cudaError_t cudaMallocHost(void **p, size_t size) { return allocate(p, size); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return allocate(p, size); }
cudaError_t cudaFreeHost(void *p) { free(p); return 0; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = 8ul << 30; return 0; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    copied(kind);
    counts[WAITS]++;
    memmove(to, from, n);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    copied(kind);
    memmove(to, from, n);
    return 0;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t s) {
    copied(kind);
    for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return 0;
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t n, size_t at, enum cudaMemcpyKind kind) { memset(to, 0, n); return 0; }
cudaError_t cudaMemset(void *p, int value, size_t n) { memset(p, value, n); return 0; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { stub_launch(); memset(p, value, n); return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    for (int i = 0; i < n_blocks; i++)
        if (blocks[i].begin && (char *)p >= blocks[i].begin && (char *)p < blocks[i].begin + blocks[i].size) a->type = cudaMemoryTypeDevice;
    a->devicePointer = a->hostPointer = (void *)p;
    return 0;
}

/* Streams, events and CUDA graphs */

static cudaError_t wait_for_device(void) { counts[WAITS]++; return recording ? cudaErrorStreamCaptureUnsupported : 0; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = malloc(16); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = malloc(16); return 0; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait_for_device(); }
cudaError_t cudaDeviceSynchronize(void) { return wait_for_device(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return 0; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { recording = 1; return 0; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { recording = 0; counts[RECORDINGS]++; *g = malloc(16); return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = recording ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = malloc(16); return 0; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { counts[REPLAYS]++; return 0; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return 0; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = malloc(16); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = malloc(16); return 0; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0; return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return wait_for_device(); }

/* Kernels */

cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { stub_launch(); return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { stub_launch(); return 0; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { stub_launch(); return 0; }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { stub_launch(); return 0; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->binaryVersion = a->ptxVersion = 90;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int value) { return 0; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int value, int device) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned flags) { *n = 2; return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *f = (void *)stub_launch;
    if (found) *found = 0;
    return 0;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *name) { *k = malloc(16); return 0; }
cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *code, enum cudaJitOption *a, void **b, unsigned c, enum cudaLibraryOption *d,
                                void **e, unsigned f) { *l = malloc(16); return 0; }
cudaError_t cudaLibraryUnload(cudaLibrary_t l) { return 0; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *p) { *pool = malloc(16); return 0; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return 0; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) { memset(value, 0, 8); return 0; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) { return 0; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t n) { return 0; }
const char *cudaGetErrorName(cudaError_t e) { return "an error of the stub"; }
const char *cudaGetErrorString(cudaError_t e) { return "an error of the stub"; }
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaPeekAtLastError(void) { return 0; }

/* What nvcc's code calls at load and at `kernel<<<..>>>()` */

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared, *(void **)stream = configured.stream;
    return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return 0; }
void **__cudaRegisterFatBinary(void *binary) { return malloc(16); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
void __cudaUnregisterFatBinary(void **handle) {}
