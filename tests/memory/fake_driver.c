/* A CUDA driver made of ordinary memory: what `_vmm.c` uses of it, with one device of limited size.
 *
 * Addresses come from mmap, pages from memfd, so contents really go with the pages and a touched hole crashes.
 * `fake_fail(call, nth)` makes the nth next call of that name fail; counters tell what is held. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_MAPS 4096
static struct { uint64_t address, nbytes; int fd; } maps[MAX_MAPS];
static int num_maps, num_handles, pushed, synchronized;
static uint64_t capacity = 2ull << 30, used, sizes[MAX_MAPS];
static char failing[32];
static int failing_in;

static int fails(const char *call) {
    if (strcmp(call, failing) != 0 || failing_in == 0) return 0;
    return --failing_in == 0;
}
#define MAY_FAIL(call) if (fails(call)) return 999

void fake_fail(const char *call, int nth) { strncpy(failing, call, sizeof failing - 1); failing_in = nth; }
void fake_capacity(uint64_t nbytes) { capacity = nbytes; }
uint64_t fake_used(void) { return used; }
int fake_handles(void) { return num_handles; }
int fake_maps(void) { return num_maps; }
int fake_pushed(void) { return pushed; }
int fake_synchronized(void) { return synchronized; }

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "asked to fail"; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute, (void)device; *value = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = maps; return device < 2 ? 0 : 101; }
int cuCtxPushCurrent_v2(void *context) { (void)context; pushed++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = maps; pushed--; return 0; }
int cuCtxSynchronize(void) { MAY_FAIL("cuCtxSynchronize"); synchronized++; return 0; }
int cuMemGetAllocationGranularity(size_t *unit, const void *prop, int option) {
    (void)prop, (void)option;
    *unit = 1 << 16;
    return 0;
}
int cuMemAddressReserve(uint64_t *address, size_t nbytes, size_t alignment, uint64_t hint, unsigned long long flags) {
    (void)alignment, (void)hint, (void)flags;
    MAY_FAIL("cuMemAddressReserve");
    void *at = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 2;
    *address = (uint64_t)(uintptr_t)at;
    return 0;
}
int cuMemCreate(uint64_t *handle, size_t nbytes, const void *prop, unsigned long long flags) {
    (void)prop, (void)flags;
    MAY_FAIL("cuMemCreate");
    if (used + nbytes > capacity) return 2;
    int fd = memfd_create("pages", 0);
    if (fd < 0 || fd >= MAX_MAPS || ftruncate(fd, (off_t)nbytes)) return 2;
    used += nbytes, num_handles++, sizes[fd] = nbytes;
    *handle = (uint64_t)fd;
    return 0;
}
int cuMemRelease(uint64_t handle) {
    MAY_FAIL("cuMemRelease");
    used -= sizes[handle], num_handles--;
    return close((int)handle) ? 1 : 0;
}
int cuMemMap(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    MAY_FAIL("cuMemMap");
    void *at = mmap((void *)(uintptr_t)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);
    if (at == MAP_FAILED || num_maps == MAX_MAPS) return 1;
    maps[num_maps].address = address, maps[num_maps].nbytes = nbytes, num_maps++;
    return 0;
}
int cuMemUnmap(uint64_t address, size_t nbytes) {
    MAY_FAIL("cuMemUnmap");
    for (int i = 0; i < num_maps; i++)
        if (maps[i].address == address && maps[i].nbytes == nbytes) {
            maps[i] = maps[--num_maps];
            void *at = mmap((void *)(uintptr_t)address, nbytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            return at == MAP_FAILED;
        }
    return 1;
}
int cuMemSetAccess(uint64_t address, size_t nbytes, const void *access, size_t count) {
    (void)access, (void)count;
    MAY_FAIL("cuMemSetAccess");
    return mprotect((void *)(uintptr_t)address, nbytes, PROT_READ | PROT_WRITE) ? 1 : 0;
}
