// Optimizer arithmetic, gradient norm and casts. Compiled once per instruction set from this one source; the order of
// roundings is the definition (docs/numerics.md), so every set, the torch fallback and a GPU give the same bits.
// Everything is in an anonymous namespace and no standard template is used: a copy compiled for a newer instruction
// set must never be the one the linker keeps for the baseline.
#include "kernels.h"

#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

namespace penstock {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct None {};
struct Rounded {  // a float in memory that is read as the bfloat16 it rounds to
  float value;
};

INLINE uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

INLINE float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

INLINE float load(float f) { return f; }

INLINE float load(BFloat16 b) { return float_of(static_cast<uint32_t>(b.bits) << 16); }

INLINE float load(Float16 h) {
  const uint32_t exponents = 0x7c00u << 13;
  uint32_t u = (h.bits & 0x7fffu) << 13;
  const uint32_t exponent = u & exponents;
  u += (127u - 15u) << 23;
  const uint32_t special = u + ((128u - 16u) << 23);                                             // infinity and NaN
  const uint32_t denormal = bits_of(float_of(u + (1u << 23)) - float_of(113u << 23));
  u = exponent == exponents ? special : exponent == 0 ? denormal : u;
  return float_of(u | (h.bits & 0x8000u) << 16);
}

// Round to nearest, ties to even; every NaN becomes the one positive quiet NaN.
template <class T>
INLINE T round_to(float f);

template <>
INLINE float round_to<float>(float f) {
  return f;
}

template <>
INLINE BFloat16 round_to<BFloat16>(float f) {
  const uint32_t u = bits_of(f);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

template <>
INLINE Float16 round_to<Float16>(float f) {
  const uint32_t magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;  // adding it makes the hardware round a denormal
  const uint32_t u = bits_of(f) & 0x7fffffffu;
  const uint32_t sign = bits_of(f) >> 16 & 0x8000u;
  const uint32_t normal = (u + 0xfffu + (u >> 13 & 1u) - ((127u - 15u) << 23)) >> 13;
  const uint32_t denormal = bits_of(float_of(u) + float_of(magic)) - magic;
  const uint32_t finite = (u < 113u << 23 ? denormal : normal) | sign;
  const uint32_t over = u >= (127u + 16u) << 23 ? (0x7c00u | sign) : finite;
  return {static_cast<uint16_t>(u > 0x7f800000u ? 0x7e00u : over)};
}

INLINE float load(Rounded r) { return load(round_to<BFloat16>(r.value)); }

// One element's step. `m` and `v` are the moments, where the optimizer has them.
template <Kind K>
INLINE float update(float p, float g, float& m, float& v, const Scalars& s) {
  if constexpr (K == kAdamW || K == kAdam) {
    if constexpr (K == kAdamW) p = p * s.decay;
    if constexpr (K == kAdam) g = g + s.l2 * p;
    m = m + s.weight1 * (g - m);
    v = s.beta2 * v + (s.weight2 * g) * g;
    return p - (s.rate * m) / (__builtin_sqrtf(v) * s.root + s.eps);
  } else if constexpr (K == kLion) {
    const float c = s.beta1 * m + s.weight1 * g;
    m = s.beta2 * m + s.weight2 * g;
    return p * s.decay - (c > 0.0f ? s.rate : c < 0.0f ? -s.rate : 0.0f);
  } else {
    g = g + s.l2 * p;
    if constexpr (K != kSGD) m = s.beta1 * m + g;
    if constexpr (K == kMomentum) g = m;
    if constexpr (K == kNesterov) g = g + s.beta1 * m;
    return p - s.rate * g;
  }
}

// The definition: square in double, then fold the second half onto the first until one number is left. The first four
// folds are done in registers: columns of 16 numbers that lie kBlock / 16 apart.
template <class G>
INLINE double fold(const G* __restrict x) {
  constexpr size_t columns = kBlock / 16;
  double v[columns];
  for (size_t c = 0; c < columns; ++c) {
    double d[8];
    for (size_t i = 0; i < 8; ++i) {
      const double a = load(x[c + i * columns]), b = load(x[c + (i + 8) * columns]);
      d[i] = a * a + b * b;
    }
    v[c] = ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
  }
  for (size_t half = columns / 2; half > 0; half /= 2) {
#pragma GCC ivdep
    for (size_t i = 0; i < half; ++i) v[i] += v[i + half];
  }
  return v[0];
}

// The working copy is not read again soon. Written around the caches, its lines need not be read before they are
// written: 28 bytes per element cross the memory bus and not 30. Both are aligned to kLine bytes.
constexpr size_t kLine = 64;

template <class O>
INLINE void stream_block(O* __restrict dst, const O* __restrict src) {
  constexpr size_t bytes = kBlock * sizeof(O);
  char* to = reinterpret_cast<char*>(dst);
  const char* from = reinterpret_cast<const char*>(src);
#if defined(__AVX512F__)
  for (size_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
#elif defined(__AVX2__)
  for (size_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
#elif defined(__SSE2__)
  for (size_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
  memcpy(to, from, bytes);
#endif
}

INLINE void streams_are_visible() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class O>
INLINE void write_block(O* __restrict dst, const O* __restrict src, size_t n) {
  if (n == kBlock && reinterpret_cast<uintptr_t>(dst) % kLine == 0) return stream_block(dst, src);
  memcpy(dst, src, n * sizeof(O));
}

template <Kind K, class G, class O>
void step_range(const StepArgs& args, size_t begin, size_t end) {
  constexpr bool has_first = K != kSGD, has_second = K == kAdamW || K == kAdam, has_out = !std::is_same_v<O, None>;
  const G* __restrict grad = static_cast<const G*>(args.grad);
  float* __restrict master = args.master;
  float* __restrict first = args.first;
  float* __restrict second = args.second;
  O* __restrict out = static_cast<O*>(args.out);
  const Scalars s = args.scalars;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t stop = at + kBlock < end ? at + kBlock : end;
    alignas(kLine) O rounded[has_out ? kBlock : 1];
    for (size_t i = at; i < stop; ++i) {
      float m = has_first ? first[i] : 0.0f, v = has_second ? second[i] : 0.0f;
      const float p = update<K>(master[i], load(grad[i]) * s.grad_scale, m, v, s);
      if constexpr (has_first) first[i] = m;
      if constexpr (has_second) second[i] = v;
      master[i] = p;
      if constexpr (has_out) rounded[i - at] = round_to<O>(p);
    }
    if constexpr (has_out) write_block(out + at, rounded, stop - at);
    if (args.partials) args.partials[at / kBlock] = fold(grad + at);  // after: the gradients are now in the cache
  }
  if constexpr (has_out) streams_are_visible();
}

template <Kind K, class G>
void step_to(DType out, const StepArgs& args, size_t begin, size_t end) {
  if (out == kBFloat16) return step_range<K, G, BFloat16>(args, begin, end);
  if (out == kFloat16) return step_range<K, G, Float16>(args, begin, end);
  step_range<K, G, None>(args, begin, end);
}

template <Kind K>
void step_from(DType grad, DType out, const StepArgs& args, size_t begin, size_t end) {
  if (grad == kBFloat16) return step_to<K, BFloat16>(out, args, begin, end);
  if (grad == kRounded) return step_to<K, Rounded>(out, args, begin, end);
  step_to<K, float>(out, args, begin, end);
}

void step(Kind kind, DType grad, DType out, const StepArgs& args, size_t begin, size_t end) {
  switch (kind) {
    case kAdamW: return step_from<kAdamW>(grad, out, args, begin, end);
    case kAdam: return step_from<kAdam>(grad, out, args, begin, end);
    case kSGD: return step_from<kSGD>(grad, out, args, begin, end);
    case kMomentum: return step_from<kMomentum>(grad, out, args, begin, end);
    case kNesterov: return step_from<kNesterov>(grad, out, args, begin, end);
    case kLion: return step_from<kLion>(grad, out, args, begin, end);
    case kKinds: break;
  }
}

template <class X>
void norms_range(const void* x, double* partials, size_t begin, size_t end) {
  for (size_t at = begin; at < end; at += kBlock) partials[at / kBlock] = fold(static_cast<const X*>(x) + at);
}

void norms(DType type, const void* x, double* partials, size_t begin, size_t end) {
  if (type == kBFloat16) return norms_range<BFloat16>(x, partials, begin, end);
  if (type == kRounded) return norms_range<Rounded>(x, partials, begin, end);
  norms_range<float>(x, partials, begin, end);
}

template <class X>
void add_range(float* __restrict acc, const X* __restrict x, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) acc[i] = acc[i] + load(x[i]);
}

void add(DType type, float* acc, const void* x, size_t begin, size_t end) {
  if (type == kBFloat16) return add_range(acc, static_cast<const BFloat16*>(x), begin, end);
  add_range(acc, static_cast<const float*>(x), begin, end);
}

template <class D, class S>
void cast_range(D* __restrict dst, const S* __restrict src, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) dst[i] = round_to<D>(load(src[i]));
}

template <class D>
void cast_from(D* dst, DType from, const void* src, size_t begin, size_t end) {
  if (from == kBFloat16) return cast_range(dst, static_cast<const BFloat16*>(src), begin, end);
  if (from == kFloat16) return cast_range(dst, static_cast<const Float16*>(src), begin, end);
  cast_range(dst, static_cast<const float*>(src), begin, end);
}

void cast(DType to, void* dst, DType from, const void* src, size_t begin, size_t end) {
  if (to == kBFloat16) return cast_from(static_cast<BFloat16*>(dst), from, src, begin, end);
  if (to == kFloat16) return cast_from(static_cast<Float16*>(dst), from, src, begin, end);
  cast_from(static_cast<float*>(dst), from, src, begin, end);
}

}  // namespace

extern const Table CONCAT(table_, PENSTOCK_LEVEL) = {step, norms, add, cast};

}  // namespace penstock
