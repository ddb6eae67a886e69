// A kernel whose asynchronous I/O does all that a real one may: it takes some of the requests, moves them in any order,
// stops short, is interrupted, and fails. Bytes are moved when a request comes back, so that what is looked at too early
// is not there yet. Stands in for `syscall` in the store's library.
#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <linux/aio_abi.h>
#include <mutex>
#include <random>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

std::mutex lock;
std::mt19937_64 rng;
std::vector<iocb> flying;
long moves, fail_at, fail_with, refusal;
long failed_fd, failed_offset;  // of the request that failed
long bytes;                     // moved in all, as the store may count them: in multiples of the grain
long grain;  // bytes: a short request moves a multiple of it, at least one

bool chance(int in) { return rng() % in == 0; }

// What the request that is to fail comes to: minus an errno, or 0, the end of a file.
long failure(const iocb& request) {
    failed_fd = request.aio_fildes, failed_offset = request.aio_offset;
    return -fail_with;
}

long moved(const iocb& request) {
    if (moves++ == fail_at) return failure(request);
    size_t n = request.aio_nbytes;
    if (chance(4)) n = std::min<size_t>(n, (1 + rng() % (n / grain + 1)) * grain);
    void* memory = reinterpret_cast<void*>(request.aio_buf);
    const ssize_t done = request.aio_lio_opcode == IOCB_CMD_PWRITE
                             ? pwrite(request.aio_fildes, memory, n, request.aio_offset)
                             : pread(request.aio_fildes, memory, n, request.aio_offset);
    if (done < 0) return -errno;
    const long odd = done > grain && chance(6) ? rng() % grain : 0;  // it stopped within a block
    bytes += (done - odd) / grain * grain;
    return done - odd;
}

long failed(int error) {
    errno = error;
    return -1;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void hostile_begin(uint64_t seed, long at, long with, long of) {
    rng.seed(seed);
    moves = 0, fail_at = at, fail_with = with, grain = of, refusal = 0, bytes = 0, failed_fd = -1;
}
__attribute__((visibility("default"))) void hostile_refuse(long error) { refusal = error; }
__attribute__((visibility("default"))) long hostile_flying() { return flying.size(); }
__attribute__((visibility("default"))) long hostile_moves() { return moves; }
__attribute__((visibility("default"))) long hostile_bytes() { return bytes; }
__attribute__((visibility("default"))) long hostile_failed_fd() { return failed_fd; }
__attribute__((visibility("default"))) long hostile_failed_offset() { return failed_offset; }

long hostile_syscall(long number, ...) noexcept {
    std::lock_guard<std::mutex> guard(lock);
    va_list rest;
    va_start(rest, number);
    long result = failed(ENOSYS);
    if (number == SYS_io_setup) {
        va_arg(rest, long);
        *va_arg(rest, aio_context_t*) = 1;
        result = refusal ? failed(refusal) : 0;
    } else if (number == SYS_io_submit) {
        va_arg(rest, aio_context_t);
        const long count = va_arg(rest, long);
        iocb** requests = va_arg(rest, iocb**);
        if (chance(6)) {
            result = failed(EINTR);
        } else if (chance(6) && !flying.empty()) {
            result = failed(EAGAIN);
        } else if (moves == fail_at && fail_with && chance(2)) {
            ++moves;
            failure(*requests[0]);
            result = failed(fail_with);
        } else {
            result = 1 + rng() % count;
            for (long i = 0; i < result; ++i) flying.push_back(*requests[i]);
        }
    } else if (number == SYS_io_getevents) {
        va_arg(rest, aio_context_t);
        const long least = va_arg(rest, long), most = va_arg(rest, long);
        io_event* events = va_arg(rest, io_event*);
        if (chance(6)) {
            result = failed(EINTR);
        } else {
            const long there = std::min<long>(most, flying.size());
            result = there ? std::max(least, long(rng() % (there + 1))) : 0;
            for (long i = 0; i < result; ++i) {
                std::swap(flying[rng() % flying.size()], flying.back());
                const iocb request = flying.back();
                flying.pop_back();
                events[i] = {request.aio_data, 0, chance(20) ? -long(EINTR) : moved(request), 0};
            }
        }
    }
    va_end(rest);
    return result;
}
}
