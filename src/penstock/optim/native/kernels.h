// The kernels of one instruction set. Each works on a range of elements in the caller's thread; api.cpp splits a call
// over threads and picks the set. No Python or torch header: the library is loaded with ctypes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace penstock {

// kRounded: floats in memory, each rounded to bfloat16 as it is read. Only what is read can be of it.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNone = 3, kRounded = 4 };
enum Kind : int { kAdamW = 0, kAdam = 1, kSGD = 2, kMomentum = 3, kNesterov = 4, kLion = 5, kKinds = 6 };

constexpr size_t kBlock = 4096;  // elements of one partial of the gradient norm

// Computed once per step in double and rounded to float (optim/formula.py). Mirrored by optim/library.py.
struct Scalars {
  float grad_scale, decay, l2, beta1, weight1, beta2, weight2, rate, root, eps;
};

struct StepArgs {
  const void* grad;           // float, bfloat16 or float that is rounded
  float* master;
  float* first;               // exp_avg or momentum_buffer; null for plain SGD
  float* second;              // exp_avg_sq; null unless Adam or AdamW
  void* out;                  // bfloat16 or float16 copy of the new master; null: none
  double* partials;           // one per kBlock elements of grad as read, before grad_scale; null: none
  Scalars scalars;
};

struct Table {
  void (*step)(Kind kind, DType grad, DType out, const StepArgs& args, size_t begin, size_t end);
  void (*norms)(DType type, const void* x, double* partials, size_t begin, size_t end);
  void (*add)(DType type, float* acc, const void* x, size_t begin, size_t end);
  void (*cast)(DType to, void* dst, DType from, const void* src, size_t begin, size_t end);
};

extern const Table table_baseline;
#ifdef PENSTOCK_X86_LEVELS
extern const Table table_avx2;
extern const Table table_avx512;
#endif

}  // namespace penstock
