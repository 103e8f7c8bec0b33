/* The CUDA driver with one call that fails when asked to: `faulty_fail(call, nth)`. All else goes to libcuda. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

static char failing[32];
static int failing_in;

void faulty_fail(const char *call, int nth) { strncpy(failing, call, sizeof failing - 1); failing_in = nth; }

static int fails(const char *call) {
    if (strcmp(call, failing) != 0 || failing_in == 0) return 0;
    return --failing_in == 0;
}

static void *real(const char *symbol) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    return dlsym(driver, symbol);
}

#define FORWARD(name, parameters, arguments) \
    int name parameters { \
        if (fails(#name)) return 999; \
        return ((int (*) parameters) real(#name)) arguments; \
    }

typedef uint64_t Address;
typedef unsigned long long Flags;
FORWARD(cuInit, (unsigned flags), (flags))
FORWARD(cuGetErrorString, (int code, const char **text), (code, text))
FORWARD(cuDeviceGetAttribute, (int *value, int attribute, int device), (value, attribute, device))
FORWARD(cuDevicePrimaryCtxRetain, (void **context, int device), (context, device))
FORWARD(cuCtxPushCurrent_v2, (void *context), (context))
FORWARD(cuCtxPopCurrent_v2, (void **context), (context))
FORWARD(cuCtxSynchronize, (void), ())
FORWARD(cuMemGetAllocationGranularity, (size_t *unit, const void *prop, int option), (unit, prop, option))
FORWARD(cuMemAddressReserve, (Address *a, size_t n, size_t alignment, Address hint, Flags flags), (a, n, alignment, hint, flags))
FORWARD(cuMemCreate, (Address *handle, size_t n, const void *prop, Flags flags), (handle, n, prop, flags))
FORWARD(cuMemRelease, (Address handle), (handle))
FORWARD(cuMemMap, (Address a, size_t n, size_t offset, Address handle, Flags flags), (a, n, offset, handle, flags))
FORWARD(cuMemUnmap, (Address a, size_t n), (a, n))
FORWARD(cuMemSetAccess, (Address a, size_t n, const void *access, size_t count), (a, n, access, count))
