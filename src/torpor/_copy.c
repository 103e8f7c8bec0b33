/* Many copies of host memory in one call, so that Python pays for one and other threads go on meanwhile. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* `rows`: `count` times three numbers: address to copy to, address to copy from, bytes. They must not overlap. */
__attribute__((visibility("default"))) void torpor_copy(const int64_t *rows, int64_t count)
{
    for (int64_t i = 0; i < count; i++, rows += 3)
        memcpy((void *)(intptr_t)rows[0], (const void *)(intptr_t)rows[1], (size_t)rows[2]);
}
