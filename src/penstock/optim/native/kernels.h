// The kernels of one instruction set. Each works on a range of elements in the caller's thread; api.cpp splits a call
// over threads and picks the set. No Python or torch header: the library is loaded with ctypes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace penstock {

// kRounded: floats in memory, each rounded to bfloat16 as it is read. Only what is read can be of it.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kRounded = 3 };
enum Kind : int { kAdamW = 0, kAdam = 1, kSGD = 2, kMomentum = 3, kNesterov = 4, kLion = 5,
                  kMuon = 6, kNesterovMuon = 7, kOrthogonal = 8 };
// Where the fp32 master copy is: it is the weights; their halves are `weights` and `rest`; or it is `rest`, and
// `weights` are it rounded. Of kMuon and kNesterovMuon there is none, and what they make is rounded to `weights`.
enum Form : int { kWhole = 0, kSplit = 1, kBeside16 = 2, kBesideFloat16 = 3, kMade16 = 4 };
enum Moment : int { kMoment32 = 0, kMoment16 = 1, kCodes = 2 };  // float, bfloat16, 8-bit codes with scales

constexpr size_t kBlock = 4096;  // elements of one partial of the gradient norm
constexpr size_t kGroup = 32;    // codes that share a scale

// Computed once per step in double and rounded to float (optim/formula.py). Mirrored by optim/library.py.
struct Scalars {
  float grad_scale, decay, l2, beta1, weight1, beta2, weight2, rate, root, eps;
};

// A moment's numbers. int8 codes for exp_avg and momentum_buffer, uint8 for exp_avg_sq.
struct MomentArgs {
  void* values;      // null: the optimizer has none
  uint16_t* scales;  // one per kGroup codes
};

struct StepArgs {
  const void* grad;  // float, bfloat16 or float that is rounded
  void* weights;
  void* rest;
  MomentArgs first;   // exp_avg or momentum_buffer; none for plain SGD and kOrthogonal
  MomentArgs second;  // exp_avg_sq; none unless Adam or AdamW
  double* partials;   // one per kBlock elements of grad as read, before grad_scale; null: none
  Scalars scalars;
  Kind kind;
  DType grad_type;
  Form form;
  Moment first_type, second_type;
};

struct Table {
  void (*step)(const StepArgs& args, size_t begin, size_t end);
  void (*norms)(DType type, const void* x, double* partials, size_t begin, size_t end);
  void (*add)(DType type, float* acc, const void* x, size_t begin, size_t end);
  void (*cast)(DType to, void* dst, DType from, const void* src, size_t begin, size_t end);
  void (*split)(void* weights, void* rest, const float* master, size_t begin, size_t end);
  void (*join)(float* master, const void* weights, const void* rest, size_t begin, size_t end);
  void (*encode)(bool second, void* codes, uint16_t* scales, const float* x, size_t begin, size_t end);
  void (*decode)(bool second, float* x, const void* codes, const uint16_t* scales, size_t begin, size_t end);
};

extern const Table table_baseline;
#ifdef PENSTOCK_X86_LEVELS
extern const Table table_avx2;
extern const Table table_avx512;
#endif

}  // namespace penstock
