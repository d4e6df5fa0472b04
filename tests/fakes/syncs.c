/* Preloaded into a daemon: notes every write and sync of an index in the file $KVTIER_TEST_SYNCS, in their order.

   "w": written, not yet on the medium; "d": written through to it (O_DSYNC); "s": all that was written is there. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void note(int fd, char what) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    const char *file = getenv("KVTIER_TEST_SYNCS"), *name = "/data.mdb";
    if (!file || n < (ssize_t)strlen(name) || memcmp(path + n - strlen(name), name, strlen(name)))
        return;
    if (what == 'w' && fcntl(fd, F_GETFL) & O_DSYNC)
        what = 'd';
    int notes = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (write(notes, &what, 1) != 1)
        abort();
    close(notes);
}

#define NOTED(what, type, name, declared, ...)                                                                         \
    type name declared {                                                                                               \
        type(*real) declared = dlsym(RTLD_NEXT, #name);                                                                \
        type done = real(__VA_ARGS__);                                                                                 \
        note(fd, what);                                                                                                \
        return done;                                                                                                   \
    }

NOTED('w', ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), fd, data, n, at)
NOTED('w', ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), fd, data, n, at)
NOTED('w', ssize_t, writev, (int fd, const struct iovec *data, int n), fd, data, n)
NOTED('w', ssize_t, pwritev, (int fd, const struct iovec *data, int n, off_t at), fd, data, n, at)
NOTED('w', ssize_t, pwritev64, (int fd, const struct iovec *data, int n, off64_t at), fd, data, n, at)
NOTED('s', int, fdatasync, (int fd), fd)
NOTED('s', int, fsync, (int fd), fd)
