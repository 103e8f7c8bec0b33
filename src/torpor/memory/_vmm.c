/* Device memory whose pages can go while its addresses stay.
 *
 * An allocator for torch.cuda.memory.CUDAPluggableAllocator over the virtual memory calls of the CUDA driver.
 * One segment is one request of torch's caching allocator. `torpor_vmm_unmap` gives the pages of segments back
 * to the driver, `torpor_vmm_map` puts new pages at the same addresses; what is in them is the caller's affair,
 * and so is waiting for work that still uses them.
 *
 * The driver library is opened at run time and its few types are declared here, so that building needs a C
 * compiler and nothing else. Types and values: CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api.
 *
 * Every function returns a code: 0, a CUresult, or one of the negative codes below. Nothing prints or exits.
 * A call that fails leaves all segments as they were; only where the driver refuses the undo as well, or will not
 * let go of a handle, are segments left without pages, which `torpor_vmm_segments` shows. One mutex guards the tables; it is never held while
 * calling back into torch or Python.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    NO_LIBRARY = -1,      /* the driver library cannot be opened, or lacks a symbol */
    NO_HOST_MEMORY = -2,  /* malloc failed */
    NO_SUCH_SEGMENT = -3, /* an address that is not the start of a segment */
    TOO_MANY_DEVICES = -4
};

/* ---- what is used of the driver's interface ---- */

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef uint64_t Handle;
typedef struct { int type; int id; } Location;
typedef struct {
    int type;
    int handle_types;
    Location location;
    void *win32_metadata;
    struct { unsigned char compression, rdma_capable; unsigned short usage; unsigned char reserved[4]; } flags;
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;

enum { ALLOCATION_PINNED = 1, LOCATION_DEVICE = 1, ACCESS_READWRITE = 3, GRANULARITY_MINIMUM = 0 };
enum { ATTRIBUTE_VMM_SUPPORTED = 102, ATTRIBUTE_RDMA_WITH_VMM = 110 };
enum { CUDA_ERROR_NOT_SUPPORTED = 801 };

static struct driver {
    CUresult (*init)(unsigned);
    CUresult (*error_string)(CUresult, const char **);
    CUresult (*device_attribute)(int *, int, int);
    CUresult (*primary_retain)(void **, int);
    CUresult (*push)(void *);
    CUresult (*pop)(void **);
    CUresult (*synchronize)(void);
    CUresult (*granularity)(size_t *, const AllocationProp *, int);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*create)(Handle *, size_t, const AllocationProp *, unsigned long long);
    CUresult (*release)(Handle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, Handle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const AccessDesc *, size_t);
} driver;

static const struct { const char *symbol; size_t offset; } SYMBOLS[] = {
    {"cuInit", offsetof(struct driver, init)},
    {"cuGetErrorString", offsetof(struct driver, error_string)},
    {"cuDeviceGetAttribute", offsetof(struct driver, device_attribute)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct driver, primary_retain)},
    {"cuCtxPushCurrent_v2", offsetof(struct driver, push)},
    {"cuCtxPopCurrent_v2", offsetof(struct driver, pop)},
    {"cuCtxSynchronize", offsetof(struct driver, synchronize)},
    {"cuMemGetAllocationGranularity", offsetof(struct driver, granularity)},
    {"cuMemAddressReserve", offsetof(struct driver, reserve)},
    {"cuMemCreate", offsetof(struct driver, create)},
    {"cuMemRelease", offsetof(struct driver, release)},
    {"cuMemMap", offsetof(struct driver, map)},
    {"cuMemUnmap", offsetof(struct driver, unmap)},
    {"cuMemSetAccess", offsetof(struct driver, set_access)},
};

/* ---- state ---- */

typedef struct {
    uint64_t address;
    uint64_t nbytes;
    uint64_t serial; /* never used again, unlike an address */
    int32_t device;
    int32_t mapped;
    Handle handle; /* valid while mapped */
} Segment;

typedef struct { uint64_t address, nbytes; int device; } Region;

typedef struct {
    int32_t code;
    char call[28];
    uint64_t address;
    uint64_t nbytes;
} Failure;

typedef struct {
    void *context;
    size_t granularity;
    AllocationProp prop;
    AccessDesc access;
} Device;

enum { MAX_DEVICES = 64 };
static const uint64_t REGION_BYTES = 1ull << 37; /* of addresses, not of memory */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_open;
static Device devices[MAX_DEVICES];
static Segment *segments; /* sorted by address */
static size_t num_segments, capacity_segments;
static Region *regions;
static size_t num_regions;
static uint64_t next_serial = 1;
static Failure background; /* the last failure inside malloc or free, which cannot report one */
static uint64_t num_background;

static int fail(Failure *failure, int code, const char *call, uint64_t address, uint64_t nbytes) {
    if (code != 0) {
        failure->code = code;
        strncpy(failure->call, call, sizeof failure->call - 1);
        failure->call[sizeof failure->call - 1] = 0;
        failure->address = address;
        failure->nbytes = nbytes;
    }
    return code;
}

/* ---- devices ---- */

static int device_open(Device *device, int index, Failure *failure) {
    int rdma = 0, supported = 0, code;
    if ((code = driver.device_attribute(&supported, ATTRIBUTE_VMM_SUPPORTED, index)))
        return fail(failure, code, "cuDeviceGetAttribute", 0, 0);
    if (!supported) return fail(failure, CUDA_ERROR_NOT_SUPPORTED, "virtual memory management", 0, 0);
    if ((code = driver.device_attribute(&rdma, ATTRIBUTE_RDMA_WITH_VMM, index)))
        return fail(failure, code, "cuDeviceGetAttribute", 0, 0);
    device->prop.type = ALLOCATION_PINNED;
    device->prop.location.type = LOCATION_DEVICE;
    device->prop.location.id = index;
    device->prop.flags.rdma_capable = rdma != 0; /* else network cards refuse to register the memory */
    device->access.location = device->prop.location;
    device->access.flags = ACCESS_READWRITE;
    if ((code = driver.granularity(&device->granularity, &device->prop, GRANULARITY_MINIMUM)))
        return fail(failure, code, "cuMemGetAllocationGranularity", 0, 0);
    void *context = NULL;
    if ((code = driver.primary_retain(&context, index)))
        return fail(failure, code, "cuDevicePrimaryCtxRetain", 0, 0);
    device->context = context; /* last: it marks the device as open */
    return 0;
}

/* Make the device's primary context current; every success needs a `device_leave`. */
static int device_enter(int index, Failure *failure) {
    int code;
    if (!is_open) return fail(failure, NO_LIBRARY, "torpor_vmm_open", 0, 0);
    if (index < 0 || index >= MAX_DEVICES) return fail(failure, TOO_MANY_DEVICES, "device", 0, 0);
    if (!devices[index].context && (code = device_open(&devices[index], index, failure))) return code;
    return fail(failure, driver.push(devices[index].context), "cuCtxPushCurrent", 0, 0);
}

static void device_leave(void) {
    void *ignored;
    driver.pop(&ignored);
}

/* ---- tables ---- */

/* Index of the first segment at or after `address`. */
static size_t find(uint64_t address) {
    size_t low = 0, high = num_segments;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segments[middle].address < address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int insert(Segment segment) {
    if (num_segments == capacity_segments) {
        size_t capacity = capacity_segments ? 2 * capacity_segments : 256;
        Segment *grown = realloc(segments, capacity * sizeof *grown);
        if (!grown) return NO_HOST_MEMORY;
        segments = grown;
        capacity_segments = capacity;
    }
    size_t at = find(segment.address);
    memmove(segments + at + 1, segments + at, (num_segments - at) * sizeof *segments);
    segments[at] = segment;
    num_segments++;
    return 0;
}

static void erase(size_t at) {
    num_segments--;
    memmove(segments + at, segments + at + 1, (num_segments - at) * sizeof *segments);
}

/* The first gap of `nbytes` addresses in a region, 0 if there is none. Neighbours can share driver calls. */
static uint64_t gap_in(const Region *region, uint64_t nbytes) {
    uint64_t at = region->address, end = region->address + region->nbytes;
    for (size_t i = find(at); i < num_segments && segments[i].address < end; i++) {
        if (segments[i].address - at >= nbytes) return at;
        at = segments[i].address + segments[i].nbytes;
    }
    return end - at >= nbytes ? at : 0;
}

/* Addresses for a new segment; reserves a region when no gap is left. */
static int take_addresses(int device, uint64_t nbytes, uint64_t *address, Failure *failure) {
    for (size_t i = 0; i < num_regions; i++)
        if (regions[i].device == device && (*address = gap_in(&regions[i], nbytes))) return 0;
    Region *grown = realloc(regions, (num_regions + 1) * sizeof *grown);
    if (!grown) return fail(failure, NO_HOST_MEMORY, "realloc", 0, nbytes);
    regions = grown;
    uint64_t wanted = nbytes > REGION_BYTES ? nbytes : REGION_BYTES;
    int code = driver.reserve(address, wanted, 0, 0, 0);
    if (code && wanted > nbytes) code = driver.reserve(address, wanted = nbytes, 0, 0, 0);
    if (code) return fail(failure, code, "cuMemAddressReserve", 0, wanted);
    regions[num_regions++] = (Region){*address, wanted, device};
    return 0;
}

/* ---- pages ---- */

static int pages_create(Segment *segment, Failure *failure) {
    int code = driver.create(&segment->handle, segment->nbytes, &devices[segment->device].prop, 0);
    return fail(failure, code, "cuMemCreate", segment->address, segment->nbytes);
}

static int pages_map(const Segment *segment, Failure *failure) {
    int code = driver.map(segment->address, segment->nbytes, 0, segment->handle, 0);
    return fail(failure, code, "cuMemMap", segment->address, segment->nbytes);
}

/* Allow access to segments that follow each other in the address space, in one call for each unbroken run. */
static int pages_open(const size_t *chosen, size_t count, Failure *failure) {
    for (size_t i = 0, j; i < count; i = j) {
        const Segment *first = &segments[chosen[i]];
        uint64_t end = first->address + first->nbytes;
        for (j = i + 1; j < count && segments[chosen[j]].address == end; j++) end += segments[chosen[j]].nbytes;
        int code = driver.set_access(first->address, end - first->address, &devices[first->device].access, 1);
        if (code) return fail(failure, code, "cuMemSetAccess", first->address, end - first->address);
    }
    return 0;
}

/* New pages for segments of one device that have none: all of them or none of them. */
static int pages_take(const size_t *chosen, size_t count, Failure *failure) {
    size_t created = 0, mapped = 0;
    int code = 0;
    for (; created < count; created++)
        if ((code = pages_create(&segments[chosen[created]], failure))) goto undo;
    for (; mapped < count; mapped++)
        if ((code = pages_map(&segments[chosen[mapped]], failure))) goto undo;
    if ((code = pages_open(chosen, count, failure))) goto undo;
    for (size_t i = 0; i < count; i++) segments[chosen[i]].mapped = 1;
    return 0;
undo:
    while (mapped-- > 0) driver.unmap(segments[chosen[mapped]].address, segments[chosen[mapped]].nbytes);
    while (created-- > 0) driver.release(segments[chosen[created]].handle);
    return code;
}

/* Undo of a `pages_give` that stopped half-way: the same pages, contents included, at their addresses again.
 * Should the driver refuse this too, the segments stay without pages, and say so. */
static void pages_put_back(const size_t *chosen, size_t count) {
    Failure ignored;
    size_t mapped = 0;
    while (mapped < count && !pages_map(&segments[chosen[mapped]], &ignored)) mapped++;
    if (mapped == count && !pages_open(chosen, count, &ignored)) return;
    while (mapped-- > 0) driver.unmap(segments[chosen[mapped]].address, segments[chosen[mapped]].nbytes);
    for (size_t i = 0; i < count; i++) {
        driver.release(segments[chosen[i]].handle);
        segments[chosen[i]].mapped = 0;
    }
}

/* Give the pages of mapped segments of one device back. Handles are let go last: until then a failure can be
 * undone without losing a byte. */
static int pages_give(const size_t *chosen, size_t count, Failure *failure) {
    int code = 0;
    for (size_t i = 0; i < count; i++) {
        const Segment *segment = &segments[chosen[i]];
        if ((code = driver.unmap(segment->address, segment->nbytes))) {
            fail(failure, code, "cuMemUnmap", segment->address, segment->nbytes);
            pages_put_back(chosen, i);
            return code;
        }
    }
    for (size_t i = 0; i < count; i++) {
        Segment *segment = &segments[chosen[i]];
        int refused = driver.release(segment->handle);
        if (refused && !code) code = fail(failure, refused, "cuMemRelease", segment->address, segment->nbytes);
        segment->mapped = 0;
    }
    return code;
}

/* ---- exported: the allocator ---- */

static void note_background(const Failure *failure) {
    background = *failure;
    num_background++;
}

static int allocate(uint64_t nbytes, int device, uint64_t *address, Failure *failure) {
    const size_t unit = devices[device].granularity;
    Segment segment = {.nbytes = (nbytes + unit - 1) / unit * unit, .device = device, .serial = next_serial};
    int code = take_addresses(device, segment.nbytes, &segment.address, failure);
    if (code) return code;
    if ((code = insert(segment))) return fail(failure, code, "realloc", 0, nbytes);
    size_t at = find(segment.address);
    if ((code = pages_take(&at, 1, failure))) {
        erase(at);
        return code;
    }
    next_serial++;
    *address = segment.address;
    return 0;
}

EXPORT void *torpor_vmm_malloc(ssize_t nbytes, int device, void *stream) {
    (void)stream;
    uint64_t address = 0;
    Failure failure = {0};
    if (nbytes <= 0) return NULL;
    pthread_mutex_lock(&mutex);
    int code = device_enter(device, &failure);
    if (!code) {
        code = allocate((uint64_t)nbytes, device, &address, &failure);
        device_leave();
    }
    if (code) note_background(&failure);
    pthread_mutex_unlock(&mutex);
    return code ? NULL : (void *)(uintptr_t)address; /* torch frees its cache and asks again, then raises */
}

EXPORT void torpor_vmm_free(void *pointer, ssize_t nbytes, int device, void *stream) {
    (void)nbytes, (void)stream;
    Failure failure = {0};
    if (!pointer) return;
    pthread_mutex_lock(&mutex);
    int code = device_enter(device, &failure);
    if (!code) {
        size_t at = find((uint64_t)(uintptr_t)pointer);
        if (at == num_segments || segments[at].address != (uint64_t)(uintptr_t)pointer)
            code = fail(&failure, NO_SUCH_SEGMENT, "free", (uint64_t)(uintptr_t)pointer, 0);
        else if (segments[at].mapped && !(code = fail(&failure, driver.synchronize(), "cuCtxSynchronize", 0, 0)))
            code = pages_give(&at, 1, &failure); /* waited first, as cudaFree does */
        if (!code) erase(at);
        device_leave();
    }
    if (code) note_background(&failure);
    pthread_mutex_unlock(&mutex);
}

/* ---- exported: pages of many segments at once ---- */

static int compare(const void *left, const void *right) {
    const size_t a = *(const size_t *)left, b = *(const size_t *)right;
    return (a > b) - (a < b);
}

/* Indexes, sorted, of those among `addresses` whose pages are not in the wanted state. */
static int choose(const uint64_t *addresses, size_t count, int mapped, size_t *chosen, size_t *num, Failure *failure) {
    *num = 0;
    for (size_t i = 0; i < count; i++) {
        size_t at = find(addresses[i]);
        if (at == num_segments || segments[at].address != addresses[i])
            return fail(failure, NO_SUCH_SEGMENT, "find", addresses[i], 0);
        if (segments[at].mapped != mapped) chosen[(*num)++] = at;
    }
    qsort(chosen, *num, sizeof *chosen, compare);
    size_t unique = 0;
    for (size_t i = 0; i < *num; i++)
        if (!unique || chosen[unique - 1] != chosen[i]) chosen[unique++] = chosen[i];
    *num = unique;
    return 0;
}

static int change(const uint64_t *addresses, size_t count, int device, int mapped, uint64_t *nbytes, Failure *failure) {
    *nbytes = 0;
    size_t num, *chosen = malloc((count ? count : 1) * sizeof *chosen);
    if (!chosen) return fail(failure, NO_HOST_MEMORY, "malloc", 0, count * sizeof *chosen);
    pthread_mutex_lock(&mutex);
    int code = device_enter(device, failure);
    if (!code) {
        code = choose(addresses, count, mapped, chosen, &num, failure);
        if (!code) code = mapped ? pages_take(chosen, num, failure) : pages_give(chosen, num, failure);
        for (size_t i = 0; !code && i < num; i++) *nbytes += segments[chosen[i]].nbytes;
        device_leave();
    }
    pthread_mutex_unlock(&mutex);
    free(chosen);
    return code;
}

/* Give back the pages of the segments of `device` that start at `addresses`. Segments without pages are left
 * as they are. `nbytes`: bytes given back. */
EXPORT int torpor_vmm_unmap(const uint64_t *addresses, size_t count, int device, uint64_t *nbytes, Failure *failure) {
    return change(addresses, count, device, 0, nbytes, failure);
}

/* New pages, contents undefined, for the segments that start at `addresses`; the counterpart of the above. */
EXPORT int torpor_vmm_map(const uint64_t *addresses, size_t count, int device, uint64_t *nbytes, Failure *failure) {
    return change(addresses, count, device, 1, nbytes, failure);
}

/* ---- exported: opening and asking ---- */

EXPORT int torpor_vmm_open(const char *library, Failure *failure) {
    int code = 0;
    pthread_mutex_lock(&mutex);
    if (!is_open) {
        void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (!handle) code = fail(failure, NO_LIBRARY, "dlopen", 0, 0);
        for (size_t i = 0; !code && i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
            void *symbol = dlsym(handle, SYMBOLS[i].symbol);
            if (!symbol) code = fail(failure, NO_LIBRARY, SYMBOLS[i].symbol, 0, 0);
            else memcpy((char *)&driver + SYMBOLS[i].offset, &symbol, sizeof symbol);
        }
        if (!code) code = fail(failure, driver.init(0), "cuInit", 0, 0);
        is_open = !code;
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

/* The driver's words for a code of its own. The text belongs to the driver. */
EXPORT const char *torpor_vmm_error_text(int code) {
    const char *text = NULL;
    if (code > 0 && is_open && driver.error_string(code, &text) == 0) return text;
    return NULL;
}

/* Grows with every new segment. */
EXPORT uint64_t torpor_vmm_serial(void) {
    pthread_mutex_lock(&mutex);
    uint64_t serial = next_serial;
    pthread_mutex_unlock(&mutex);
    return serial;
}

/* Copy up to `capacity` segments, sorted by address; returns how many there are. */
EXPORT size_t torpor_vmm_segments(Segment *out, size_t capacity) {
    pthread_mutex_lock(&mutex);
    size_t num = num_segments;
    if (num) memcpy(out, segments, (num < capacity ? num : capacity) * sizeof *out);
    pthread_mutex_unlock(&mutex);
    return num;
}

/* The last failure inside malloc or free; returns how many there were since the library was loaded. */
EXPORT uint64_t torpor_vmm_background_failure(Failure *out) {
    pthread_mutex_lock(&mutex);
    *out = background;
    uint64_t num = num_background;
    pthread_mutex_unlock(&mutex);
    return num;
}
