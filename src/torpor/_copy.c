/* Copies of host memory, many in one call, and blocks of a file with them: Python pays for one call, and other threads
 * go on meanwhile. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

/* A block of the file: the cuts up to `end`, from where those of the block before end, lie in it. */
struct block {
    int64_t offset, nbytes, end;
};

/* `nbytes` bytes, `at` bytes from the beginning of a block and at `address` in memory. */
struct cut {
    int64_t at, address, nbytes;
};

/* `rows`: `count` times three numbers: address to copy to, address to copy from, bytes. They must not overlap. */
EXPORTED void torpor_copy(const int64_t *rows, int64_t count)
{
    for (int64_t i = 0; i < count; i++, rows += 3)
        memcpy((void *)(intptr_t)rows[0], (const void *)(intptr_t)rows[1], (size_t)rows[2]);
}

/* Gather each of the blocks `first` to `count` in `buffer` and write it. Returns the block at which the system took
 * fewer bytes than that or none, `count` if there was none such. */
EXPORTED int64_t torpor_write_blocks(int fd, char *buffer, const struct block *blocks, int64_t first, int64_t count,
                                     const struct cut *cuts)
{
    for (int64_t i = first; i < count; i++) {
        for (int64_t k = i ? blocks[i - 1].end : 0; k < blocks[i].end; k++)
            memcpy(buffer + cuts[k].at, (const void *)(intptr_t)cuts[k].address, (size_t)cuts[k].nbytes);
        if (pwrite(fd, buffer, (size_t)blocks[i].nbytes, blocks[i].offset) != blocks[i].nbytes)
            return i;
    }
    return count;
}

/* The way back. What a filesystem read through its cache all the same does not stay there. */
EXPORTED int64_t torpor_read_blocks(int fd, char *buffer, const struct block *blocks, int64_t first, int64_t count,
                                    const struct cut *cuts)
{
    for (int64_t i = first; i < count; i++) {
        if (pread(fd, buffer, (size_t)blocks[i].nbytes, blocks[i].offset) != blocks[i].nbytes)
            return i;
        posix_fadvise(fd, blocks[i].offset, blocks[i].nbytes, POSIX_FADV_DONTNEED);
        for (int64_t k = i ? blocks[i - 1].end : 0; k < blocks[i].end; k++)
            memcpy((void *)(intptr_t)cuts[k].address, buffer + cuts[k].at, (size_t)cuts[k].nbytes);
    }
    return count;
}
