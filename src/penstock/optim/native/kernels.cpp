// Optimizer arithmetic, gradient norm and casts. Compiled once per instruction set from this one source; the order of
// roundings is the definition (docs/numerics.md), so every set, the torch fallback and a GPU give the same bits.
// Everything is in an anonymous namespace and no standard template is used: a copy compiled for a newer instruction
// set must never be the one the linker keeps for the baseline.
#include "kernels.h"

#include "compact.h"
#include "numbers.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

namespace penstock {
namespace {

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

// The working copy beside a master is not read again soon. Written around the caches, its lines need not be read before
// they are written: 28 bytes per element cross the memory bus and not 30. Both are aligned to kLine bytes.
constexpr size_t kLine = 64;

template <class O>
INLINE void stream_tile(O* __restrict dst, const O* __restrict src) {
  constexpr size_t bytes = kTile * sizeof(O);
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

template <class D, class S>
INLINE void convert(D* __restrict dst, const S* __restrict src, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = round_to<D>(load(src[i]));
}

template <class O>
void write_rounded(O* __restrict dst, const float* __restrict src, size_t n) {
  alignas(kLine) O rounded[kTile];
  convert(rounded, src, n);
  if (n == kTile && reinterpret_cast<uintptr_t>(dst) % kLine == 0) return stream_tile(dst, rounded);
  memcpy(dst, rounded, n * sizeof(O));
}

// One tile's floats: `buffer`, or the memory itself where it has floats, so that nothing is copied.
using Tile = float[kTile];

const float* read_gradient(const StepArgs& args, size_t at, size_t n, Tile& buffer) {
  const float* floats = static_cast<const float*>(args.grad);
  if (args.grad_type == kBFloat16) {
    convert(buffer, static_cast<const BFloat16*>(args.grad) + at, n);
  } else if (args.grad_type == kRounded) {
    convert(buffer, reinterpret_cast<const Rounded*>(floats) + at, n);
  } else {
    return floats + at;
  }
  return buffer;
}

float* read_master(const StepArgs& args, size_t at, size_t n, Tile& buffer) {
  if (args.form == kWhole) return static_cast<float*>(args.weights) + at;
  if (args.form != kSplit) return static_cast<float*>(args.rest) + at;
  join_range(buffer, static_cast<BFloat16*>(args.weights) + at, static_cast<uint16_t*>(args.rest) + at, n);
  return buffer;
}

void write_master(const StepArgs& args, size_t at, size_t n, const float* p) {
  BFloat16* weights = static_cast<BFloat16*>(args.weights) + at;
  if (args.form == kSplit) return split_range(weights, static_cast<uint16_t*>(args.rest) + at, p, n);
  if (args.form == kBeside16) return write_rounded(weights, p, n);
  if (args.form == kBesideFloat16) return write_rounded(static_cast<Float16*>(args.weights) + at, p, n);
}

// C: the type of its codes.
template <class C>
float* read_moment(const MomentArgs& moment, Moment type, size_t at, size_t n, Tile& buffer) {
  if (moment.values == nullptr) return buffer;
  if (type == kMoment32) return static_cast<float*>(moment.values) + at;
  if (type == kMoment16) {
    convert(buffer, static_cast<const BFloat16*>(moment.values) + at, n);
  } else {
    decode_tile(buffer, static_cast<const C*>(moment.values) + at, moment.scales + at / kGroup, n);
  }
  return buffer;
}

template <class C>
void write_moment(const MomentArgs& moment, Moment type, size_t at, size_t n, const float* values) {
  if (moment.values == nullptr || type == kMoment32) return;
  if (type == kMoment16) return convert(static_cast<BFloat16*>(moment.values) + at, values, n);
  encode_tile(static_cast<C*>(moment.values) + at, moment.scales + at / kGroup, values, n);
}

template <Kind K>
void update_tile(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
                 const Scalars& scalars, size_t n) {
  constexpr bool has_first = K != kSGD, has_second = K == kAdamW || K == kAdam;
  const Scalars s = scalars;
  for (size_t i = 0; i < n; ++i) {
    float first = has_first ? m[i] : 0.0f, second = has_second ? v[i] : 0.0f;
    p[i] = update<K>(p[i], g[i] * s.grad_scale, first, second, s);
    if constexpr (has_first) m[i] = first;
    if constexpr (has_second) v[i] = second;
  }
}

using Update = void (*)(float*, const float*, float*, float*, const Scalars&, size_t);

Update update_of(Kind kind) {
  switch (kind) {
    case kAdamW: return update_tile<kAdamW>;
    case kAdam: return update_tile<kAdam>;
    case kSGD: return update_tile<kSGD>;
    case kMomentum: return update_tile<kMomentum>;
    case kNesterov: return update_tile<kNesterov>;
    case kLion: return update_tile<kLion>;
  }
  return nullptr;
}

void norms(DType type, const void* x, double* partials, size_t begin, size_t end);

// Whatever the state's form, it is the same few loops over a tile: to floats, the update, and back. The tile stays in
// the first cache meanwhile, and a form costs no other copy of the rest.
void step(const StepArgs& args, size_t begin, size_t end) {
  const Update update = update_of(args.kind);
  alignas(kLine) Tile gradient, master, first, second;
  for (size_t block = begin; block < end; block += kBlock) {
    const size_t stop = block + kBlock < end ? block + kBlock : end;
    for (size_t at = block; at < stop; at += kTile) {
      const size_t n = stop - at < kTile ? stop - at : kTile;
      const float* g = read_gradient(args, at, n, gradient);
      float* p = read_master(args, at, n, master);
      float* m = read_moment<int8_t>(args.first, args.first_type, at, n, first);
      float* v = read_moment<uint8_t>(args.second, args.second_type, at, n, second);
      update(p, g, m, v, args.scalars, n);
      write_master(args, at, n, p);
      write_moment<int8_t>(args.first, args.first_type, at, n, m);
      write_moment<uint8_t>(args.second, args.second_type, at, n, v);
    }
    if (args.partials) norms(args.grad_type, args.grad, args.partials, block, stop);  // after: it is in the cache now
  }
  streams_are_visible();
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

template <class D>
void cast_from(D* dst, DType from, const void* src, size_t begin, size_t end) {
  if (from == kBFloat16) return convert(dst + begin, static_cast<const BFloat16*>(src) + begin, end - begin);
  if (from == kFloat16) return convert(dst + begin, static_cast<const Float16*>(src) + begin, end - begin);
  convert(dst + begin, static_cast<const float*>(src) + begin, end - begin);
}

void cast(DType to, void* dst, DType from, const void* src, size_t begin, size_t end) {
  if (to == kBFloat16) return cast_from(static_cast<BFloat16*>(dst), from, src, begin, end);
  if (to == kFloat16) return cast_from(static_cast<Float16*>(dst), from, src, begin, end);
  cast_from(static_cast<float*>(dst), from, src, begin, end);
}

void split(void* weights, void* rest, const float* master, size_t begin, size_t end) {
  split_range(static_cast<BFloat16*>(weights) + begin, static_cast<uint16_t*>(rest) + begin, master + begin,
              end - begin);
}

void join(float* master, const void* weights, const void* rest, size_t begin, size_t end) {
  join_range(master + begin, static_cast<const BFloat16*>(weights) + begin, static_cast<const uint16_t*>(rest) + begin,
             end - begin);
}

template <class F>
INLINE void each_tile(size_t begin, size_t end, const F& f) {
  for (size_t at = begin; at < end; at += kTile) f(at, end - at < kTile ? end - at : kTile);
}

void encode(bool second, void* codes, uint16_t* scales, const float* x, size_t begin, size_t end) {
  each_tile(begin, end, [&](size_t at, size_t n) {
    uint16_t* of = scales + at / kGroup;
    if (second) return encode_tile(static_cast<uint8_t*>(codes) + at, of, x + at, n);
    encode_tile(static_cast<int8_t*>(codes) + at, of, x + at, n);
  });
}

void decode(bool second, float* x, const void* codes, const uint16_t* scales, size_t begin, size_t end) {
  each_tile(begin, end, [&](size_t at, size_t n) {
    const uint16_t* of = scales + at / kGroup;
    if (second) return decode_tile(x + at, static_cast<const uint8_t*>(codes) + at, of, n);
    decode_tile(x + at, static_cast<const int8_t*>(codes) + at, of, n);
  });
}

}  // namespace

extern const Table CONCAT(table_, PENSTOCK_LEVEL) = {step, norms, add,    cast,
                                                    split, join, encode, decode};

}  // namespace penstock
