// One transfer between memory and files, of which all requests are with the kernel at once (its asynchronous I/O), and
// the checksum of each block while others are still under way. For ctypes.
//
// Linux alone, whose interface this is. No exception leaves it: what it needs is reserved before the first request.
//
// A block that is read is hashed as soon as all of it has come, one that is written at any time before the end. Nothing
// is in flight when a transfer returns, with an error or without.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "xxh3.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifndef PENSTOCK_SYSCALL  // tests have a kernel of their own
#define PENSTOCK_SYSCALL syscall
#endif
extern "C" long PENSTOCK_SYSCALL(long number, ...) noexcept;

namespace {

constexpr int WINDOW = 16;  // requests of a transfer under way at once

// A stretch of a file, and where it is in memory.
struct Piece {
    int64_t fd, file;   // file: its row of the caller's progress
    int64_t file_size;  // bytes
    int64_t offset, start, nbytes;
    int64_t grain;  // bytes: where a request that has stopped short may go on
    int64_t moved;  // out: bytes of it that were read or written
};

// Why a transfer has failed.
struct Failure {
    int64_t piece, done;  // done: bytes of it before the one where it failed, which were all moved
    int64_t error;        // errno; 0: no byte was moved
};

// Nanoseconds of the monotonic clock. Somebody looks at them meanwhile.
struct Progress {
    int64_t since;  // since when requests are under way, and none has come back; 0: none is under way
    int64_t last;   // when one came back last; 0: none has
};

struct Transfer {
    char* memory;
    int64_t nbytes;  // of memory
    Piece* pieces;
    int64_t count;
    int64_t request;         // bytes of a request at most
    const int64_t* borders;  // blocks + 1 of them: the blocks lie one after another in memory, from its first byte
    int64_t blocks;
    uint64_t* checksums;  // out: of each block; never 0, which stands for no block
    Progress* progress;   // out: of each file
    int64_t write;
    Failure failure;  // out
};

struct Request {
    int64_t piece, done, nbytes;  // done: where it begins in the piece
};

uint64_t (*const xxh3)(const void*, size_t) =
#ifdef PENSTOCK_X86_LEVELS
    __builtin_cpu_supports("avx2") ? penstock::xxh3_avx2 :
#endif
                                   penstock::xxh3_baseline;

// Nothing outside of the files and the memory is asked for, and the blocks are all of the memory.
bool sound(const Transfer& t) {
    for (const Piece* p = t.pieces; p < t.pieces + t.count; ++p) {
        const bool in_memory = 0 <= p->start && 0 < p->nbytes && p->nbytes <= t.nbytes - p->start;
        if (!in_memory || p->offset < 0 || p->offset > p->file_size - p->nbytes || p->file < 0) return false;
    }
    for (int64_t i = 0; i < t.blocks; ++i) {
        if (t.borders[i] >= t.borders[i + 1]) return false;
    }
    return !t.blocks || t.borders[t.blocks] - t.borders[0] == t.nbytes;
}

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

class Run {
  public:
    Run(Transfer& transfer, aio_context_t queue) : t_(transfer), queue_(queue), missing_(transfer.blocks) {
        int64_t requests = WINDOW, files = 0;
        for (int64_t i = 0; i < t_.count; ++i) {
            requests += (t_.pieces[i].nbytes + t_.request - 1) / t_.request;
            files = std::max(files, t_.pieces[i].file + 1);
        }
        again_.reserve(requests), ready_.reserve(t_.blocks), free_.reserve(WINDOW), at_file_.resize(files);
        for (int64_t i = 0; i < t_.blocks; ++i) missing_[i] = t_.borders[i + 1] - t_.borders[i];
        for (int i = WINDOW; i-- > 0;) free_.push_back(i);
    }

    bool run() {
        for (;;) {
            do {
                submit();
            } while (failed_ && !flying_ && !again_.empty());  // what comes before the failure is still moved
            if (!flying_ && (failed_ || done())) break;
            const bool hashes = t_.write ? hashed_ < t_.blocks && !failed_ : !ready_.empty();
            if (hashes) hash(t_.write ? hashed_++ : next_ready());
            if (flying_) reap(hashes ? 0 : 1);
        }
        return !failed_;
    }

  private:
    bool done() const {
        return next_ == t_.count && again_.empty() && (t_.write ? hashed_ == t_.blocks : ready_.empty());
    }

    int64_t next_ready() {
        const int64_t block = ready_.back();
        ready_.pop_back();
        return block;
    }

    void hash(int64_t block) {
        const int64_t start = t_.borders[block];
        const uint64_t digest = xxh3(t_.memory + start - t_.borders[0], t_.borders[block + 1] - start);
        t_.checksums[block] = digest ? digest : 1;
    }

    // The next request to make: what has stopped short goes on first. After a failure only what comes before it.
    bool next(Request& request) {
        while (!again_.empty()) {
            request = again_.back();
            again_.pop_back();
            if (!failed_ || before(request.piece, request.done, t_.failure)) return true;
        }
        if (failed_ || next_ == t_.count) return false;
        const Piece& piece = t_.pieces[next_];
        request = {next_, at_, std::min(t_.request, piece.nbytes - at_)};
        at_ += request.nbytes;
        if (at_ == piece.nbytes) ++next_, at_ = 0;
        return true;
    }

    // Make requests until the window is full, or there is none left.
    void submit() {
        iocb* batch[WINDOW];
        int count = 0;
        Request request;
        while (!free_.empty() && next(request)) {
            const int slot = free_.back();
            free_.pop_back();
            const Piece& piece = t_.pieces[request.piece];
            iocb& block = blocks_[slot];
            memset(&block, 0, sizeof block);
            block.aio_data = slot;
            block.aio_lio_opcode = t_.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
            block.aio_fildes = piece.fd;
            block.aio_buf = reinterpret_cast<uint64_t>(t_.memory + piece.start + request.done);
            block.aio_nbytes = request.nbytes;
            block.aio_offset = piece.offset + request.done;
            requests_[slot] = request;
            batch[count++] = &block;
        }
        int given = 0;
        while (given < count) {
            for (int i = given; i < count; ++i) begun(batch[i]->aio_data);
            const long taken = PENSTOCK_SYSCALL(SYS_io_submit, queue_, long(count - given), batch + given);
            const int error = errno;
            for (int i = given + std::max(taken, 0l); i < count; ++i) ended(batch[i]->aio_data, false);
            errno = error;
            if (taken > 0) {
                given += taken, flying_ += taken;
            } else if (errno == EAGAIN && flying_) {  // it has no room for more at present
                break;
            } else if (errno != EINTR) {  // it is the first one's error
                finished(batch[given++]->aio_data, -errno);
                if (failed_) break;
            }
        }
        for (; given < count; ++given) {
            const int slot = batch[given]->aio_data;
            again_.push_back(requests_[slot]);
            free_.push_back(slot);
        }
    }

    // Take in what has come back; ``least``: wait until so many have.
    void reap(long least) {
        io_event events[WINDOW];
        const long count = PENSTOCK_SYSCALL(SYS_io_getevents, queue_, least, long(WINDOW), events, nullptr);
        if (count < 0 && errno != EINTR) {  // the drive still writes to the memory, and nobody will ever know until when
            std::fprintf(stderr, "penstock: io_getevents failed while requests were under way: %s\n", strerror(errno));
            std::abort();
        }
        for (long i = 0; i < count; ++i) {
            --flying_;
            ended(events[i].data, true);
            finished(events[i].data, events[i].res);
        }
    }

    Progress& progress(int slot) { return t_.progress[t_.pieces[requests_[slot].piece].file]; }
    int& at_file(int slot) { return at_file_[t_.pieces[requests_[slot].piece].file]; }

    void begun(int slot) {
        if (at_file(slot)++ == 0) __atomic_store_n(&progress(slot).since, now(), __ATOMIC_RELAXED);
    }

    void ended(int slot, bool came_back) {
        const bool none = --at_file(slot) == 0;
        if (came_back) __atomic_store_n(&progress(slot).last, now(), __ATOMIC_RELAXED);
        if (came_back || none) __atomic_store_n(&progress(slot).since, none ? 0 : now(), __ATOMIC_RELAXED);
    }

    // A request has come back with the bytes moved, or minus an errno.
    void finished(int slot, int64_t result) {
        const Request request = requests_[slot];
        Piece& piece = t_.pieces[request.piece];
        free_.push_back(slot);
        if (result == -EINTR) {
            again_.push_back(request);
            return;
        }
        const int64_t moved = std::max<int64_t>(result, 0);
        const int64_t whole = moved == request.nbytes ? moved : moved / piece.grain * piece.grain;
        piece.moved += whole;
        if (!t_.write) came(piece.start + request.done, whole);
        if (whole == request.nbytes) return;
        if (whole > 0) {
            again_.push_back({request.piece, request.done + whole, request.nbytes - whole});
        } else {
            fail({request.piece, request.done + moved, result < 0 ? -result : 0});
        }
    }

    static bool before(int64_t piece, int64_t done, const Failure& failure) {
        return std::pair(piece, done) < std::pair(failure.piece, failure.done);
    }

    // Of several failures the first in the order of bytes is told.
    void fail(const Failure& failure) {
        if (!failed_ || before(failure.piece, failure.done, t_.failure)) t_.failure = failure;
        failed_ = true;
    }

    // Bytes of the memory have been read: blocks that are whole now are ready.
    void came(int64_t start, int64_t nbytes) {
        const int64_t *first = t_.borders, *end = first + t_.blocks + 1;
        start += first[0];
        const int64_t stop = start + nbytes;
        for (int64_t i = std::upper_bound(first, end, start) - first - 1; i < t_.blocks && first[i] < stop; ++i) {
            missing_[i] -= std::min(stop, first[i + 1]) - std::max(start, first[i]);
            if (missing_[i] == 0) ready_.push_back(i);
        }
    }

    Transfer& t_;
    const aio_context_t queue_;
    iocb blocks_[WINDOW];
    Request requests_[WINDOW];
    std::vector<int> free_;       // slots of the two above
    std::vector<Request> again_;  // rests of requests that have stopped short
    std::vector<int64_t> missing_, ready_;  // bytes of each block that have not come; blocks that are to be hashed
    std::vector<int> at_file_;              // requests of each file that are under way
    int64_t next_ = 0, at_ = 0;  // the first piece, and byte of it, of which no request was made yet
    int64_t hashed_ = 0;         // blocks that are written and hashed
    int flying_ = 0;
    bool failed_ = false;
};

}  // namespace

EXPORT int penstock_abi() noexcept { return 2; }

// A queue of the kernel's into ``queue``, for one transfer at a time of this process; 0, or an errno.
EXPORT int penstock_queue(uint64_t* queue) noexcept {
    aio_context_t made = 0;
    if (PENSTOCK_SYSCALL(SYS_io_setup, long(WINDOW), &made)) return errno;
    io_event none;
    if (PENSTOCK_SYSCALL(SYS_io_getevents, made, 0l, 1l, &none, nullptr) < 0 && errno != EINTR) {  // it is forbidden
        const int error = errno;
        PENSTOCK_SYSCALL(SYS_io_destroy, made);
        return error;
    }
    *queue = made;
    return 0;
}

// 1: done; 0: it has failed (``failure``); -1: the arguments are wrong, and nothing was touched.
EXPORT int penstock_transfer(uint64_t queue, Transfer* transfer) noexcept {
    return sound(*transfer) ? Run(*transfer, queue).run() : -1;
}
