/* A libcuda.so.1 that does nothing but say, on standard error, what NVIDIA's bindings have made of kvtier's calls. The
   structures are those of NVIDIA's cuda.h. A few calls fail, as the test that reads this expects.

   With -DGATE a call says nothing: it writes a byte to descriptor 100 and returns when it can read one from 101. If it
   waits in vain, it ends the process: its caller holds the interpreter lock, so that no other thread can answer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef GATE
#define SAYS(...) gate(__func__)
static void gate(const char *name) {
    struct pollfd answer = {.fd = 101, .events = POLLIN};
    char byte = 0;
    if (write(100, &byte, 1) == 1 && poll(&answer, 1, 10000) == 1 && read(101, &byte, 1) == 1) return;
    fprintf(stderr, "%s: the caller holds the interpreter lock\n", name);
    _exit(3);
}
#else
#define SAYS(...) (fprintf(stderr, "%s ", __func__), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr))
#endif

typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location at; void *security; struct { unsigned char a, b; unsigned short c; unsigned char d[4]; } flags; } Properties;
typedef struct { Location at; int flags; } Access;
typedef struct { int order; Location source, target; unsigned flags; } Attributes;

Result cuInit(unsigned flags) { SAYS("%u", flags); return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGetCount(int *count) { *count = 2; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetUuid_v2(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i; return 0; }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub %d", device); return 0; }
Result cuDeviceGetPCIBusId(char *id, int length, int device) { snprintf(id, length, "0000:3B:0%d.0", device); return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; SAYS("%d %d", attribute, device); return 0; }
Result cuGetErrorString(int error, const char **text) { *text = "as the test asked"; return 0; }
Result cuDevicePrimaryCtxRetain(Handle *context, int device) { *context = (Handle)0xc0; SAYS("%d", device); return 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) { SAYS("%d", device); return 0; }
Result cuCtxSetCurrent(Handle context) { SAYS("%p", context); return 0; }
Result cuCtxPushCurrent_v2(Handle context) { SAYS("%p", context); return 0; }
Result cuCtxPopCurrent_v2(Handle *context) { *context = (Handle)0xc0; SAYS("."); return 0; }
Result cuThreadExchangeStreamCaptureMode(int *mode) { SAYS("%d", *mode); *mode = 1; return 0; }
Result cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 5ull << 40; *total = 9ull << 40; return 0; }
Result cuMemGetAllocationGranularity(size_t *bytes, const Properties *of, int option) { *bytes = 2 << 20; return of->type != 1 || option; }
Result cuMemCreate(Pointer *handle, size_t size, const Properties *of, Pointer flags) { *handle = 77; SAYS("%zu type %d handles %d at %d %d rdma %d flags %llu", size, of->type, of->handles, of->at.type, of->at.id, of->flags.b, flags); return 0; }
Result cuMemRelease(Pointer handle) { SAYS("%llu", handle); return 0; }
Result cuMemAddressReserve(Pointer *address, size_t size, size_t alignment, Pointer hint, Pointer flags) { *address = 0x7000000000; SAYS("%zu %zu %llu %llu", size, alignment, hint, flags); return 0; }
Result cuMemAddressFree(Pointer address, size_t size) { SAYS("%llx %zu", address, size); return 0; }
Result cuMemMap(Pointer address, size_t size, size_t offset, Pointer handle, Pointer flags) { SAYS("%llx %zu %zu %llu %llu", address, size, offset, handle, flags); return 0; }
Result cuMemUnmap(Pointer address, size_t size) { SAYS("%llx %zu", address, size); return 0; }
Result cuMemSetAccess(Pointer address, size_t size, const Access *of, size_t count) { SAYS("%llx %zu at %d %d flags %d count %zu", address, size, of->at.type, of->at.id, of->flags, count); return 0; }
Result cuMemExportToShareableHandle(void *fd, Pointer handle, int type, Pointer flags) { *(int *)fd = memfd_create("stub", 0); SAYS("%llu %d %llu", handle, type, flags); return 0; }
Result cuMemImportFromShareableHandle(Pointer *handle, void *fd, int type) { *handle = 78; SAYS("%ld %d", (long)fd, type); return 0; }
Result cuPointerGetAttribute(void *value, int attribute, Pointer address) { *(int *)value = 1; SAYS("%d %llx", attribute, address); return 0; }
Result cuMemAlloc_v2(Pointer *address, size_t size) { *address = 0x7100000000; SAYS("%zu", size); return 0; }
Result cuMemFree_v2(Pointer address) { SAYS("%llx", address); return 0; }
Result cuMemHostRegister_v2(void *address, size_t size, unsigned flags) { SAYS("%p %zu %u", address, size, flags); return 0; }
Result cuMemHostUnregister(void *address) { SAYS("%p", address); return 0; }
Result cuMemHostAlloc(void **address, size_t size, unsigned flags) { *address = (void *)0x7200000000; SAYS("%zu %u", size, flags); return 0; }
Result cuMemFreeHost(void *address) { SAYS("%p", address); return 0; }
Result cuStreamCreate(Handle *stream, unsigned flags) { *stream = (Handle)0x51; SAYS("%u", flags); return 0; }
Result cuStreamDestroy_v2(Handle stream) { SAYS("%p", stream); return 0; }
Result cuStreamIsCapturing(Handle stream, int *status) { *status = 1; SAYS("%p", stream); return 0; }
Result cuStreamQuery(Handle stream) { static int asked; SAYS("%p", stream); return asked++ ? 0 : 600; }
Result cuEventCreate(Handle *event, unsigned flags) { *event = (Handle)0xe1; SAYS("%u", flags); return 0; }
Result cuEventDestroy_v2(Handle event) { SAYS("%p", event); return 0; }
Result cuEventRecord(Handle event, Handle stream) { SAYS("%p %p", event, stream); return 0; }
Result cuEventQuery(Handle event) { static int asked; SAYS("%p", event); return asked++ ? 0 : 600; }
Result cuMemcpyAsync(Pointer target, Pointer source, size_t size, Handle stream) { SAYS("%llx %llx %zu %p", target, source, size, stream); return size == 700 ? 700 : 0; }
Result cuMemsetD8Async(Pointer target, unsigned char value, size_t size, Handle stream) { SAYS("%llx %d %zu %p", target, value, size, stream); return size == 4711 ? 4711 : 0; }

Result cuMemcpyBatchAsync_v2(Pointer *targets, Pointer *sources, size_t *sizes, size_t count, Attributes *attributes, size_t *firsts, size_t kinds, Handle stream) {
    SAYS("%p order %d flags %u firsts %zu of %zu", stream, attributes->order, attributes->flags, firsts[0], kinds);
    for (size_t i = 0; i < count; i++) SAYS("%llx %llx %zu", targets[i], sources[i], sizes[i]);
    return 0;
}

/* As it was in CUDA 12. */
Result cuMemcpyBatchAsync(Pointer *targets, Pointer *sources, size_t *sizes, size_t count, Attributes *attributes, size_t *firsts, size_t kinds, size_t *failed, Handle stream) {
    *failed = -1;
    return cuMemcpyBatchAsync_v2(targets, sources, sizes, count, attributes, firsts, kinds, stream);
}

/* How newer bindings find the calls: by their names without a suffix, and the CUDA that they were made for. What is not
   here, they take for missing. */
Result cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *found = version < 13000 && !strcmp(name, "cuMemcpyBatchAsync") ? NULL : dlsym(RTLD_DEFAULT, newer);
    if (!*found) *found = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
