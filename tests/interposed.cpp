// System calls of a process on the files of some folders, counted; one of them fails, or is the process's last.
//
// Loaded before all else (LD_PRELOAD), so that Python, its extensions and libraries in other languages go through it.
// What is counted is armed by `interpose`. The counters live in memory that a forked child shares with its parent, who
// reads them when the child is dead.
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum Kind : int { OPEN = 1, MAKE = 2, READ = 4, WRITE = 8, FLUSH = 16, NAMES = 32, LOOK = 64, LOCK = 128 };

struct Shared {
    std::atomic<long> count;         // of the kinds that are armed
    std::atomic<long> each[8];       // of each kind
    char struck[PATH_MAX + 64];  // "name path" of the call that was hit
};

Shared* shared = nullptr;
char roots[8 * PATH_MAX];  // each followed by a newline
int kinds = 0;
long number = -1;
int error = 0;  // an errno; -1: SIGKILL
std::atomic<bool> inside[4096];  // descriptors of files in the roots

template <class F> F next(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }
#define REAL(name) static auto real = next<decltype(&::name)>(#name)

bool below(const char* path) {
    for (const char* root = roots; *root;) {
        const char* end = strchr(root, '\n');
        size_t n = end - root;
        if (!strncmp(path, root, n) && (path[n] == 0 || path[n] == '/')) return true;
        root = end + 1;
    }
    return false;
}

bool ours(int dirfd, const char* path, char* full) {
    if (!kinds || !path) return false;
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX] = "";
        if (dirfd == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return false;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            ssize_t n = ::readlink(link, base, sizeof base - 1);
            if (n < 0) return false;
            base[n] = 0;
        }
        if (snprintf(full, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return false;
    }
    return below(full);
}

bool ours(int fd) { return kinds && fd >= 0 && fd < 4096 && inside[fd]; }

// Whether this call is to fail, with errno set.
bool hit(Kind kind, const char* name, const char* path) {
    shared->each[__builtin_ctz(kind)]++;
    if (!(kinds & kind)) return false;
    if (shared->count.fetch_add(1) != number) return false;
    snprintf(shared->struck, sizeof shared->struck, "%s %s", name, path);
    if (error < 0) kill(getpid(), SIGKILL);
    errno = error;
    return true;
}

bool hit(Kind kind, const char* name, int fd) {
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t n = ::readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    errno = before;
    return hit(kind, name, path);
}

__attribute__((constructor)) void begin() {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared = new (memory) Shared{};
}

Kind opening(int flags) { return flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC) ? MAKE : OPEN; }

int noted(int fd, bool is_ours) {
    if (fd >= 0 && fd < 4096) inside[fd] = is_ours;
    return fd;
}

}  // namespace

extern "C" {

void interpose(const char* folders, int which, long at, int code) {
    snprintf(roots, sizeof roots, "%s", folders);
    kinds = which;
    number = at;
    error = code;
    shared->count = 0;
    for (auto& one : shared->each) one = 0;
    shared->struck[0] = 0;
}

long interposed_count(int kind) { return shared->each[__builtin_ctz(kind)]; }
const char* interposed_struck() { return shared->struck; }

#define MODE                                                     \
    va_list rest;                                                \
    va_start(rest, flags);                                       \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;    \
    va_end(rest)

#define OPENED(name)                                                                   \
    int name(const char* path, int flags, ...) {                                       \
        MODE;                                                                          \
        REAL(name);                                                                    \
        char full[PATH_MAX];                                                           \
        bool is_ours = ours(AT_FDCWD, path, full);                                     \
        if (is_ours && hit(opening(flags), #name, full)) return -1;                    \
        return noted(real(path, flags, mode), is_ours);                                \
    }
OPENED(open)
OPENED(open64)

#define OPENED_AT(name)                                                                \
    int name(int dir, const char* path, int flags, ...) {                              \
        MODE;                                                                          \
        REAL(name);                                                                    \
        char full[PATH_MAX];                                                           \
        bool is_ours = ours(dir, path, full);                                          \
        if (is_ours && hit(opening(flags), #name, full)) return -1;                    \
        return noted(real(dir, path, flags, mode), is_ours);                           \
    }
OPENED_AT(openat)
OPENED_AT(openat64)

int close(int fd) {
    REAL(close);
    noted(fd, false);
    return real(fd);
}

#define ON_FD(kind, result, name, parameters, ...)                \
    result name parameters {                                      \
        REAL(name);                                               \
        if (ours(fd) && hit(kind, #name, fd)) return -1;          \
        return real(__VA_ARGS__);                                 \
    }
ON_FD(READ, ssize_t, read, (int fd, void* data, size_t n), fd, data, n)
ON_FD(READ, ssize_t, pread64, (int fd, void* data, size_t n, off64_t at), fd, data, n, at)
ON_FD(READ, ssize_t, preadv64, (int fd, const iovec* v, int n, off64_t at), fd, v, n, at)
ON_FD(READ, ssize_t, preadv64v2, (int fd, const iovec* v, int n, off64_t at, int flags), fd, v, n, at, flags)
ON_FD(WRITE, ssize_t, write, (int fd, const void* data, size_t n), fd, data, n)
ON_FD(WRITE, ssize_t, writev, (int fd, const iovec* v, int n), fd, v, n)
ON_FD(WRITE, ssize_t, pwrite64, (int fd, const void* data, size_t n, off64_t at), fd, data, n, at)
ON_FD(WRITE, ssize_t, pwritev64, (int fd, const iovec* v, int n, off64_t at), fd, v, n, at)
ON_FD(WRITE, ssize_t, pwritev64v2, (int fd, const iovec* v, int n, off64_t at, int flags), fd, v, n, at, flags)
ON_FD(WRITE, int, ftruncate64, (int fd, off64_t n), fd, n)
ON_FD(FLUSH, int, fsync, (int fd), fd)
ON_FD(FLUSH, int, fdatasync, (int fd), fd)
ON_FD(LOCK, int, flock, (int fd, int how), fd, how)
ON_FD(LOOK, int, fstat64, (int fd, struct stat64* out), fd, out)
ON_FD(NAMES, int, fchmod, (int fd, mode_t mode), fd, mode)

// Everybody's way to calls that the C library has no name for. Of asynchronous requests one is taken at a time, so that
// each is counted.
long syscall(long number, ...) noexcept {
    static auto real = next<long (*)(long, ...)>("syscall");
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (long& one : a) one = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_submit && a[1] > 0) {
        const iocb* first = *reinterpret_cast<iocb**>(a[2]);
        const Kind kind = first->aio_lio_opcode == IOCB_CMD_PWRITE ? WRITE : READ;
        if (ours(first->aio_fildes) && hit(kind, "io_submit", first->aio_fildes)) return -1;
        a[1] = 1;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int posix_fallocate64(int fd, off64_t at, off64_t n) {
    REAL(posix_fallocate64);
    if (ours(fd) && hit(WRITE, "posix_fallocate64", fd)) return errno;
    return real(fd, at, n);
}

ssize_t sendfile64(int out, int in, off64_t* at, size_t n) {
    REAL(sendfile64);
    if (ours(out) && hit(WRITE, "sendfile64", out)) return -1;
    return real(out, in, at, n);
}

#define ON_PATH(kind, name, parameters, dir, path, ...)                              \
    int name parameters {                                                            \
        REAL(name);                                                                  \
        char full[PATH_MAX];                                                         \
        if (ours(dir, path, full) && hit(kind, #name, full)) return -1;              \
        return real(__VA_ARGS__);                                                    \
    }
ON_PATH(NAMES, mkdir, (const char* path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(NAMES, mkdirat, (int dir, const char* path, mode_t mode), dir, path, dir, path, mode)
ON_PATH(NAMES, rmdir, (const char* path), AT_FDCWD, path, path)
ON_PATH(NAMES, unlink, (const char* path), AT_FDCWD, path, path)
ON_PATH(NAMES, unlinkat, (int dir, const char* path, int flags), dir, path, dir, path, flags)
ON_PATH(NAMES, rename, (const char* path, const char* to), AT_FDCWD, path, path, to)
ON_PATH(NAMES, renameat, (int dir, const char* path, int other, const char* to), dir, path, dir, path, other, to)
ON_PATH(NAMES, renameat2, (int dir, const char* path, int other, const char* to, unsigned flags), dir, path, dir, path,
        other, to, flags)
ON_PATH(NAMES, chmod, (const char* path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(LOOK, stat64, (const char* path, struct stat64* out), AT_FDCWD, path, path, out)
ON_PATH(LOOK, lstat64, (const char* path, struct stat64* out), AT_FDCWD, path, path, out)
ON_PATH(LOOK, fstatat64, (int dir, const char* path, struct stat64* out, int flags), dir, path, dir, path, out, flags)
ON_PATH(LOOK, statvfs64, (const char* path, struct statvfs64* out), AT_FDCWD, path, path, out)
ON_PATH(LOOK, access, (const char* path, int mode), AT_FDCWD, path, path, mode)
ON_PATH(LOOK, faccessat, (int dir, const char* path, int mode, int flags), dir, path, dir, path, mode, flags)

int statx(int dir, const char* path, int flags, unsigned mask, struct statx* out) {
    REAL(statx);
    char full[PATH_MAX];
    if (path && *path && ours(dir, path, full) && hit(LOOK, "statx", full)) return -1;
    return real(dir, path, flags, mask, out);
}

DIR* opendir(const char* path) {
    REAL(opendir);
    char full[PATH_MAX];
    if (ours(AT_FDCWD, path, full) && hit(LOOK, "opendir", full)) return nullptr;
    return real(path);
}
}
