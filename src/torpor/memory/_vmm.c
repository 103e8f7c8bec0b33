/* Device memory whose pages can go while its addresses stay.
 *
 * An allocator for torch.cuda.memory.CUDAPluggableAllocator over the virtual memory calls of the CUDA driver.
 * Memory comes in extents: stretches of addresses with one set of pages. Each request of torch's caching
 * allocator (torch calls it a segment, here it is a piece) lies in one extent; small pieces share one, because
 * the driver takes some 35 us for each set of pages it maps or unmaps. `torpor_vmm_unmap` gives the pages of
 * extents back to the driver, `torpor_vmm_map` puts new pages at the same addresses; what is in them is the
 * caller's affair, and so is waiting for work that still uses them.
 *
 * The driver library is opened at run time and its few types are declared here, so that building needs a C
 * compiler and nothing else. Types and values: CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api.
 *
 * Every function returns a code: 0, a CUresult, or one of the negative codes below. Nothing prints or exits.
 * A call that fails leaves all extents as they were; only where the driver refuses the undo as well, or will not
 * let go of a handle, are extents left without pages, which `torpor_vmm_extents` shows. One mutex guards the
 * tables; it is never held while calling back into torch or Python.
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
    NO_SUCH_EXTENT = -3, /* an address that is not the start of an extent, or of a piece */
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
    Handle handle;       /* valid while mapped */
    uint64_t used_bytes; /* by pieces */
    int32_t shared;      /* takes further pieces that fit */
    int32_t sealed;      /* takes none for now */
} Extent;

typedef struct { uint64_t address, nbytes; } Piece;
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
    uint64_t shared_bytes; /* in extents that pieces share */
} Device;

enum { MAX_DEVICES = 64 };
static const uint64_t REGION_BYTES = 1ull << 37; /* of addresses, not of memory */
static const uint64_t SHARED_BYTES = 64ull << 20; /* the largest extent that pieces share */
static const uint64_t SHARED_PARTS = 16; /* a new one is this part of all of them, so that little lies idle */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_open;
static Device devices[MAX_DEVICES];
static Extent *extents; /* sorted by address */
static size_t num_extents, capacity_extents;
static Piece *pieces; /* sorted by address */
static size_t num_pieces, capacity_pieces;
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

/* Both tables begin with an address in each element. */
static uint64_t address_at(const void *table, size_t size, size_t index) {
    return *(const uint64_t *)((const char *)table + index * size);
}

/* Index of the first element at or after `address`. */
static size_t find_in(const void *table, size_t size, size_t num, uint64_t address) {
    size_t low = 0, high = num;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (address_at(table, size, middle) < address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static size_t find(uint64_t address) { return find_in(extents, sizeof *extents, num_extents, address); }
static size_t find_piece(uint64_t address) { return find_in(pieces, sizeof *pieces, num_pieces, address); }

/* The extent that contains `address`. */
static size_t extent_of(uint64_t address) {
    size_t at = find(address);
    return at < num_extents && extents[at].address == address ? at : at - 1;
}

static int grow(void **table, size_t size, size_t num, size_t *capacity) {
    if (num < *capacity) return 0;
    size_t wanted = *capacity ? 2 * *capacity : 256;
    void *grown = realloc(*table, wanted * size);
    if (!grown) return NO_HOST_MEMORY;
    *table = grown;
    *capacity = wanted;
    return 0;
}

static int insert_extent(Extent extent) {
    if (grow((void **)&extents, sizeof *extents, num_extents, &capacity_extents)) return NO_HOST_MEMORY;
    size_t at = find(extent.address);
    memmove(extents + at + 1, extents + at, (num_extents - at) * sizeof *extents);
    extents[at] = extent;
    num_extents++;
    return 0;
}

static void erase_extent(size_t at) {
    if (extents[at].shared) devices[extents[at].device].shared_bytes -= extents[at].nbytes;
    num_extents--;
    memmove(extents + at, extents + at + 1, (num_extents - at) * sizeof *extents);
}

static int insert_piece(Piece piece) {
    if (grow((void **)&pieces, sizeof *pieces, num_pieces, &capacity_pieces)) return NO_HOST_MEMORY;
    size_t at = find_piece(piece.address);
    memmove(pieces + at + 1, pieces + at, (num_pieces - at) * sizeof *pieces);
    pieces[at] = piece;
    num_pieces++;
    extents[extent_of(piece.address)].used_bytes += piece.nbytes;
    return 0;
}

static void erase_piece(size_t at) {
    extents[extent_of(pieces[at].address)].used_bytes -= pieces[at].nbytes;
    num_pieces--;
    memmove(pieces + at, pieces + at + 1, (num_pieces - at) * sizeof *pieces);
}

/* The first `nbytes` addresses in [begin, end) that no element of a table takes; 0 if there are none. */
static uint64_t gap_in(const void *table, size_t size, size_t num, uint64_t begin, uint64_t end, uint64_t nbytes) {
    for (size_t i = find_in(table, size, num, begin); i < num; i++) {
        const uint64_t *element = (const uint64_t *)((const char *)table + i * size); /* address, bytes */
        if (element[0] >= end) break;
        if (element[0] - begin >= nbytes) return begin;
        begin = element[0] + element[1];
    }
    return end - begin >= nbytes ? begin : 0;
}

/* Addresses for a new extent; reserves a region when no gap is left. Neighbours can share driver calls. */
static int take_addresses(int device, uint64_t nbytes, uint64_t *address, Failure *failure) {
    for (size_t i = 0; i < num_regions; i++) {
        uint64_t begin = regions[i].address, end = begin + regions[i].nbytes;
        if (regions[i].device != device) continue;
        if ((*address = gap_in(extents, sizeof *extents, num_extents, begin, end, nbytes))) return 0;
    }
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

static int pages_create(Extent *extent, Failure *failure) {
    int code = driver.create(&extent->handle, extent->nbytes, &devices[extent->device].prop, 0);
    return fail(failure, code, "cuMemCreate", extent->address, extent->nbytes);
}

static int pages_map(const Extent *extent, Failure *failure) {
    int code = driver.map(extent->address, extent->nbytes, 0, extent->handle, 0);
    return fail(failure, code, "cuMemMap", extent->address, extent->nbytes);
}

/* Allow access to extents that follow each other in the address space, in one call for each unbroken run. */
static int pages_open(const size_t *chosen, size_t count, Failure *failure) {
    for (size_t i = 0, j; i < count; i = j) {
        const Extent *first = &extents[chosen[i]];
        uint64_t end = first->address + first->nbytes;
        for (j = i + 1; j < count && extents[chosen[j]].address == end; j++) end += extents[chosen[j]].nbytes;
        int code = driver.set_access(first->address, end - first->address, &devices[first->device].access, 1);
        if (code) return fail(failure, code, "cuMemSetAccess", first->address, end - first->address);
    }
    return 0;
}

/* New pages for extents of one device that have none: all of them or none of them. */
static int pages_take(const size_t *chosen, size_t count, Failure *failure) {
    size_t created = 0, mapped = 0;
    int code = 0;
    for (; created < count; created++)
        if ((code = pages_create(&extents[chosen[created]], failure))) goto undo;
    for (; mapped < count; mapped++)
        if ((code = pages_map(&extents[chosen[mapped]], failure))) goto undo;
    if ((code = pages_open(chosen, count, failure))) goto undo;
    for (size_t i = 0; i < count; i++) extents[chosen[i]].mapped = 1;
    return 0;
undo:
    while (mapped-- > 0) driver.unmap(extents[chosen[mapped]].address, extents[chosen[mapped]].nbytes);
    while (created-- > 0) driver.release(extents[chosen[created]].handle);
    return code;
}

/* Undo of a `pages_give` that stopped half-way: the same pages, contents included, at their addresses again.
 * Should the driver refuse this too, the extents stay without pages, and say so. */
static void pages_put_back(const size_t *chosen, size_t count) {
    Failure ignored;
    size_t mapped = 0;
    while (mapped < count && !pages_map(&extents[chosen[mapped]], &ignored)) mapped++;
    if (mapped == count && !pages_open(chosen, count, &ignored)) return;
    while (mapped-- > 0) driver.unmap(extents[chosen[mapped]].address, extents[chosen[mapped]].nbytes);
    for (size_t i = 0; i < count; i++) {
        driver.release(extents[chosen[i]].handle);
        extents[chosen[i]].mapped = 0;
    }
}

/* Give the pages of mapped extents of one device back. Handles are let go last: until then a failure can be
 * undone without losing a byte. */
static int pages_give(const size_t *chosen, size_t count, Failure *failure) {
    int code = 0;
    for (size_t i = 0; i < count; i++) {
        const Extent *extent = &extents[chosen[i]];
        if ((code = driver.unmap(extent->address, extent->nbytes))) {
            fail(failure, code, "cuMemUnmap", extent->address, extent->nbytes);
            pages_put_back(chosen, i);
            return code;
        }
    }
    for (size_t i = 0; i < count; i++) {
        Extent *extent = &extents[chosen[i]];
        int refused = driver.release(extent->handle);
        if (refused && !code) code = fail(failure, refused, "cuMemRelease", extent->address, extent->nbytes);
        extent->mapped = 0;
    }
    return code;
}

/* ---- exported: the allocator ---- */

static void note_background(const Failure *failure) {
    background = *failure;
    num_background++;
}

/* A place for a small piece in an extent of `device` that has pages; 0 if there is none. */
static uint64_t place_in_shared(int device, uint64_t nbytes) {
    for (size_t i = 0; i < num_extents; i++) {
        const Extent *e = &extents[i];
        if (e->device != device || !e->shared || e->sealed || !e->mapped) continue;
        if (e->nbytes - e->used_bytes < nbytes) continue;
        uint64_t at = gap_in(pieces, sizeof *pieces, num_pieces, e->address, e->address + e->nbytes, nbytes);
        if (at) return at;
    }
    return 0;
}

static int new_extent(int device, uint64_t nbytes, int shared, uint64_t *address, Failure *failure) {
    Extent extent = {.nbytes = nbytes, .device = device, .shared = shared, .serial = next_serial};
    int code = take_addresses(device, nbytes, &extent.address, failure);
    if (code) return code;
    if ((code = insert_extent(extent))) return fail(failure, code, "realloc", 0, nbytes);
    if (shared) devices[device].shared_bytes += nbytes;
    size_t at = find(extent.address);
    if ((code = pages_take(&at, 1, failure))) {
        erase_extent(at);
        return code;
    }
    next_serial++;
    *address = extent.address;
    return 0;
}

static uint64_t round_up(uint64_t nbytes, uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }

/* Addresses with pages for a piece: in an extent that it shares, or in a new one. */
static int place(uint64_t nbytes, int device, uint64_t *address, Failure *failure) {
    if (nbytes > SHARED_BYTES / 2) return new_extent(device, nbytes, 0, address, failure);
    if ((*address = place_in_shared(device, nbytes))) return 0;
    uint64_t wanted = devices[device].shared_bytes / SHARED_PARTS;
    if (wanted > SHARED_BYTES) wanted = SHARED_BYTES;
    wanted -= wanted % nbytes; /* more pieces of this size fill it */
    if (wanted > nbytes && !new_extent(device, wanted, 1, address, failure)) return 0;
    return new_extent(device, nbytes, 1, address, failure); /* exactly as much: the first, or memory is short */
}

static int allocate(uint64_t nbytes, int device, uint64_t *address, Failure *failure) {
    nbytes = round_up(nbytes, devices[device].granularity);
    int code = place(nbytes, device, address, failure);
    if (code) return code;
    if (!insert_piece((Piece){*address, nbytes})) return 0;
    size_t at = extent_of(*address);
    Failure ignored;
    if (!extents[at].used_bytes && !pages_give(&at, 1, &ignored)) erase_extent(at);
    return fail(failure, NO_HOST_MEMORY, "realloc", 0, nbytes);
}

/* Forget a piece, and give its extent back when it was the last one in there. Waits first, as cudaFree does:
 * the memory may go to somebody else at once. */
static int release(uint64_t address, Failure *failure) {
    size_t piece = find_piece(address);
    if (piece == num_pieces || pieces[piece].address != address)
        return fail(failure, NO_SUCH_EXTENT, "free", address, 0);
    size_t at = extent_of(address);
    int code = extents[at].mapped ? fail(failure, driver.synchronize(), "cuCtxSynchronize", 0, 0) : 0;
    int is_last = extents[at].used_bytes == pieces[piece].nbytes;
    if (!code && is_last && extents[at].mapped) code = pages_give(&at, 1, failure);
    if (code) return code; /* the piece stays in the table: torch has forgotten it, the account has not */
    erase_piece(piece);
    if (is_last) erase_extent(at);
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
        code = release((uint64_t)(uintptr_t)pointer, &failure);
        device_leave();
    }
    if (code) note_background(&failure);
    pthread_mutex_unlock(&mutex);
}

/* ---- exported: pages of many extents at once ---- */

static int compare(const void *left, const void *right) {
    const size_t a = *(const size_t *)left, b = *(const size_t *)right;
    return (a > b) - (a < b);
}

/* Indexes, sorted, of those among `addresses` whose pages are not in the wanted state. */
static int choose(const uint64_t *addresses, size_t count, int mapped, size_t *chosen, size_t *num, Failure *failure) {
    *num = 0;
    for (size_t i = 0; i < count; i++) {
        size_t at = find(addresses[i]);
        if (at == num_extents || extents[at].address != addresses[i])
            return fail(failure, NO_SUCH_EXTENT, "find", addresses[i], 0);
        if (extents[at].mapped != mapped) chosen[(*num)++] = at;
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
        for (size_t i = 0; !code && i < num; i++) *nbytes += extents[chosen[i]].nbytes;
        device_leave();
    }
    pthread_mutex_unlock(&mutex);
    free(chosen);
    return code;
}

/* Give back the pages of the extents of `device` that start at `addresses`. Extents without pages are left
 * as they are. `nbytes`: bytes given back. */
EXPORT int torpor_vmm_unmap(const uint64_t *addresses, size_t count, int device, uint64_t *nbytes, Failure *failure) {
    return change(addresses, count, device, 0, nbytes, failure);
}

/* New pages, contents undefined, for the extents that start at `addresses`; the counterpart of the above. */
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

/* Whether later pieces stay out of the extents that `device` has now. */
EXPORT void torpor_vmm_seal(int device, int sealed) {
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < num_extents; i++)
        if (extents[i].device == device) extents[i].sealed = sealed;
    pthread_mutex_unlock(&mutex);
}

/* Grows with every new extent. */
EXPORT uint64_t torpor_vmm_serial(void) {
    pthread_mutex_lock(&mutex);
    uint64_t serial = next_serial;
    pthread_mutex_unlock(&mutex);
    return serial;
}

/* Copy up to `capacity` extents, sorted by address; returns how many there are. */
EXPORT size_t torpor_vmm_extents(Extent *out, size_t capacity) {
    pthread_mutex_lock(&mutex);
    size_t num = num_extents;
    if (num) memcpy(out, extents, (num < capacity ? num : capacity) * sizeof *out);
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
