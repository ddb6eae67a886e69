// The library's C interface, for ctypes. Arguments are checked by the Python side (optim/library.py).
#include "kernels.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {
namespace {

// Levels of instruction sets, best last. A machine gets the best it has; tests choose each in turn.
const Table* const kLevels[] = {
    &table_baseline,
#ifdef PENSTOCK_X86_LEVELS
    &table_avx2,
    &table_avx512,
#endif
};

int best_level() {
#ifdef PENSTOCK_X86_LEVELS
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? 2 : avx2 ? 1 : 0;
#else
  return 0;
#endif
}

int level = best_level();

constexpr size_t kGrain = 16 * kBlock;  // elements that a thread takes at a time: small enough to share out evenly

template <class F>
void each_range(size_t n, int threads, const F& f) {
  parallel(n, kGrain, threads, [](const void* c, size_t b, size_t e) { (*static_cast<const F*>(c))(b, e); }, &f);
}

}  // namespace
}  // namespace penstock

using namespace penstock;

// Raised whenever a signature below changes, or what it accepts, so that a stale library is refused and not called
// wrongly.
EXPORT int penstock_abi() { return 4; }

EXPORT int penstock_best_level() { return best_level(); }

EXPORT void penstock_use_level(int wanted) { level = wanted; }

EXPORT void penstock_step(const StepArgs* args, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t begin, size_t end) { table.step(*args, begin, end); });
}

EXPORT void penstock_norms(int type, const void* x, double* partials, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.norms(static_cast<DType>(type), x, partials, b, e); });
}

EXPORT void penstock_add(int type, float* acc, const void* x, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.add(static_cast<DType>(type), acc, x, b, e); });
}

EXPORT void penstock_cast(int to, void* dst, int from, const void* src, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) {
    table.cast(static_cast<DType>(to), dst, static_cast<DType>(from), src, b, e);
  });
}

EXPORT void penstock_split(void* weights, void* rest, const float* master, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.split(weights, rest, master, b, e); });
}

EXPORT void penstock_join(float* master, const void* weights, const void* rest, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.join(master, weights, rest, b, e); });
}

// second: of a second moment (uint8 codes of roots), else of a first one (int8 codes).
EXPORT void penstock_encode(int second, void* codes, uint16_t* scales, const float* x, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.encode(second != 0, codes, scales, x, b, e); });
}

EXPORT void penstock_decode(int second, float* x, const void* codes, const uint16_t* scales, size_t n, int threads) {
  const Table& table = *kLevels[level];
  each_range(n, threads, [&](size_t b, size_t e) { table.decode(second != 0, x, codes, scales, b, e); });
}
