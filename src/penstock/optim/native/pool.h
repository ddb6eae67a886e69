// A persistent pool of threads: starting threads for every chunk of a few MiB would cost as much as the work.
#pragma once
#include <cstddef>

namespace penstock {

using Task = void (*)(const void* context, size_t begin, size_t end);

// Calls task on ranges of `grain` elements that cover [0, n), on `threads` threads of which the caller is one. Returns
// when all are done. Which thread takes which range is left open, so no result may depend on it. A second caller
// waits for the first. Denormals are kept in every thread, whatever the caller's floating-point mode is.
void parallel(size_t n, size_t grain, int threads, Task task, const void* context);

}  // namespace penstock
