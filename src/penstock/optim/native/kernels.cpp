// Optimizer arithmetic, gradient norm and casts. Compiled once per instruction set from this one source; the order of
// roundings is the definition (docs/numerics.md), so every set, the torch fallback and a GPU give the same bits.
// Everything is in an anonymous namespace and no standard template is used: a copy compiled for a newer instruction
// set must never be the one the linker keeps for the baseline.
#include "kernels.h"

#include "compact.h"
#include "numbers.h"

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

namespace penstock {
namespace {

// One element's step. `m` and `v` are the moments, where the optimizer has them; `root` becomes that of the new v.
template <Kind K>
INLINE float update(float p, float g, float& m, float& v, float& root, const Scalars& s) {
  if constexpr (K == kAdamW || K == kAdam) {
    if constexpr (K == kAdamW) p = p * s.decay;
    if constexpr (K == kAdam) g = g + s.l2 * p;
    m = m + s.weight1 * (g - m);
    v = s.beta2 * v + (s.weight2 * g) * g;
    root = __builtin_sqrtf(v);
    return p - (s.rate * m) / (root * s.root + s.eps);
  } else if constexpr (K == kLion) {
    const float c = s.beta1 * m + s.weight1 * g;
    m = s.beta2 * m + s.weight2 * g;
    return p * s.decay - (c > 0.0f ? s.rate : c < 0.0f ? -s.rate : 0.0f);
  } else if constexpr (K == kMuon || K == kNesterovMuon) {  // what is returned is the update, and no p was there
    m = m + s.weight1 * (g - m);
    return K == kMuon ? m : m + s.weight1 * (g - m);
  } else if constexpr (K == kOrthogonal) {
    return p * s.decay - s.rate * g;
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

// What is read is `buffer`, or the memory itself where it has floats, so that nothing is copied.
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
  if (args.form == kMade16) return buffer;
  if (args.form != kSplit) return static_cast<float*>(args.rest) + at;
  join_range(buffer, static_cast<BFloat16*>(args.weights) + at, static_cast<uint16_t*>(args.rest) + at, n);
  return buffer;
}

void write_master(const StepArgs& args, size_t at, size_t n, const float* p) {
  BFloat16* weights = static_cast<BFloat16*>(args.weights) + at;
  if (args.form == kSplit) return split_range(weights, static_cast<uint16_t*>(args.rest) + at, p, n);
  if (args.form == kBeside16 || args.form == kMade16) return write_rounded(weights, p, n);
  if (args.form == kBesideFloat16) return write_rounded(static_cast<Float16*>(args.weights) + at, p, n);
}

// A moment of one tile, while it is updated.
struct TileMoment {
  float* values;           // to be updated; of codes only written, to be encoded
  const uint16_t* scales;  // null: there are no codes
  alignas(kLine) Tile buffer;
  alignas(kLine) TileCodes codes;
  alignas(kLine) TileSizes largest;  // of codes: of each group of what is written
};

template <class M>
void read_moment(TileMoment& tile, const MomentArgs& moment, Moment type, size_t at, size_t n) {
  if (moment.values == nullptr) return;
  tile.values = type == kMoment32 ? static_cast<float*>(moment.values) + at : tile.buffer;
  if (type == kMoment16) convert(tile.buffer, static_cast<const BFloat16*>(moment.values) + at, n);
  if (type != kCodes) return;
  tile.scales = moment.scales + at / kGroup;
  widen(tile.codes, static_cast<const typename M::Code*>(moment.values) + at, n);
}

template <class M>
void write_moment(const TileMoment& tile, const MomentArgs& moment, Moment type, size_t at, size_t n) {
  if (moment.values == nullptr || type == kMoment32) return;
  if (type == kMoment16) return convert(static_cast<BFloat16*>(moment.values) + at, tile.buffer, n);
  typename M::Code* codes = static_cast<typename M::Code*>(moment.values) + at;
  encode_tile<M>(codes, moment.scales + at / kGroup, tile.buffer, tile.largest, n);
}

// Both moments in codes, in one loop: one waits for divisions while the other is packed.
void write_codes(const TileMoment& first, const TileMoment& second, const StepArgs& args, size_t at, size_t n) {
  TileScales of_first, of_second;
  find_scales(of_first, args.first.scales + at / kGroup, first.largest, n / kGroup);
  find_scales(of_second, args.second.scales + at / kGroup, second.largest, n / kGroup);
  for (size_t g = 0; g < n / kGroup; ++g) {
    encode_group<First>(static_cast<int8_t*>(args.first.values) + at, first.buffer, of_first, g);
    encode_group<Second>(static_cast<uint8_t*>(args.second.values) + at, second.buffer, of_second, g);
  }
}

// Codes are decoded, and the largest of each group found, in the update's own loop: it waits for divisions anyway.
template <Kind K, bool FirstCodes, bool SecondCodes>
void update_tile(float* __restrict p, const float* __restrict g, TileMoment& first, TileMoment& second,
                 const Scalars& scalars, size_t n) {
  constexpr bool has_first = K != kSGD && K != kOrthogonal, has_second = K == kAdamW || K == kAdam;
  constexpr bool grouped = FirstCodes || SecondCodes;
  const Scalars s = scalars;
  float* __restrict first_values = first.values;
  float* __restrict second_values = second.values;
  for (size_t at = 0; at < n; at += grouped ? kGroup : n) {
    const float first_factor = FirstCodes ? First::factor(first.scales[at / kGroup]) : 0.0f;
    const float second_factor = SecondCodes ? Second::factor(second.scales[at / kGroup]) : 0.0f;
    int32_t first_most = 0, second_most = 0;
#pragma GCC ivdep
    for (size_t k = 0; k < (grouped ? kGroup : n); ++k) {
      const size_t i = at + k;
      float m = 0.0f, v = 0.0f, root = 0.0f;
      if constexpr (has_first) m = FirstCodes ? First::decoded(first.codes[i], first_factor) : first_values[i];
      if constexpr (has_second) v = SecondCodes ? Second::decoded(second.codes[i], second_factor) : second_values[i];
      p[i] = update<K>(p[i], g[i] * s.grad_scale, m, v, root, s);
      if constexpr (has_first) first_values[i] = m;
      if constexpr (has_second) second_values[i] = SecondCodes ? root : v;
      if constexpr (FirstCodes) first_most = size_of(m) > first_most ? size_of(m) : first_most;
      if constexpr (SecondCodes) second_most = size_of(root) > second_most ? size_of(root) : second_most;
    }
    if constexpr (FirstCodes) first.largest[at / kGroup] = first_most;
    if constexpr (SecondCodes) second.largest[at / kGroup] = second_most;
  }
}

using Update = void (*)(float*, const float*, TileMoment&, TileMoment&, const Scalars&, size_t);

template <Kind K>
Update update_with(bool first, bool second) {
  constexpr bool has_first = K != kSGD && K != kOrthogonal, has_second = K == kAdamW || K == kAdam;
  if (has_first && has_second && first && second) return update_tile<K, has_first, has_second>;
  if (has_first && first) return update_tile<K, has_first, false>;
  if (has_second && second) return update_tile<K, false, has_second>;
  return update_tile<K, false, false>;
}

Update update_of(const StepArgs& args) {
  const bool first = args.first_type == kCodes, second = args.second_type == kCodes;
  switch (args.kind) {
    case kAdamW: return update_with<kAdamW>(first, second);
    case kAdam: return update_with<kAdam>(first, second);
    case kSGD: return update_with<kSGD>(first, second);
    case kMomentum: return update_with<kMomentum>(first, second);
    case kNesterov: return update_with<kNesterov>(first, second);
    case kLion: return update_with<kLion>(first, second);
    case kMuon: return update_with<kMuon>(first, second);
    case kNesterovMuon: return update_with<kNesterovMuon>(first, second);
    case kOrthogonal: return update_with<kOrthogonal>(first, second);
  }
  return nullptr;
}

void norms(DType type, const void* x, double* partials, size_t begin, size_t end);

// Whatever the state's form, it is the same few loops over a tile: to floats, the update, and back. The tile stays in
// the first cache meanwhile, and a form costs no other copy of the rest.
void step(const StepArgs& args, size_t begin, size_t end) {
  const Update update = update_of(args);
  alignas(kLine) Tile gradient, master;
  TileMoment first = {}, second = {};
  const bool both_codes = args.second.values != nullptr && args.first_type == kCodes && args.second_type == kCodes;
  for (size_t block = begin; block < end; block += kBlock) {
    const size_t stop = block + kBlock < end ? block + kBlock : end;
    for (size_t at = block; at < stop; at += kTile) {
      const size_t n = stop - at < kTile ? stop - at : kTile;
      const float* g = read_gradient(args, at, n, gradient);
      float* p = read_master(args, at, n, master);
      read_moment<First>(first, args.first, args.first_type, at, n);
      read_moment<Second>(second, args.second, args.second_type, at, n);
      update(p, g, first, second, args.scalars, n);
      write_master(args, at, n, p);
      if (both_codes) {
        write_codes(first, second, args, at, n);
        continue;
      }
      write_moment<First>(first, args.first, args.first_type, at, n);
      write_moment<Second>(second, args.second, args.second_type, at, n);
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
    alignas(kLine) Tile values;
    alignas(kLine) TileSizes largest = {};
    for (size_t i = 0; i < n; ++i) values[i] = second ? __builtin_sqrtf(x[at + i]) : x[at + i];
    find_largest(largest, values, n);
    if (second) return encode_tile<Second>(static_cast<uint8_t*>(codes) + at, of, values, largest, n);
    encode_tile<First>(static_cast<int8_t*>(codes) + at, of, values, largest, n);
  });
}

void decode(bool second, float* x, const void* codes, const uint16_t* scales, size_t begin, size_t end) {
  each_tile(begin, end, [&](size_t at, size_t n) {
    const uint16_t* of = scales + at / kGroup;
    if (second) return decode_tile<Second>(x + at, static_cast<const uint8_t*>(codes) + at, of, n);
    decode_tile<First>(x + at, static_cast<const int8_t*>(codes) + at, of, n);
  });
}

}  // namespace

extern const Table CONCAT(table_, PENSTOCK_LEVEL) = {step, norms, add,    cast,
                                                    split, join, encode, decode};

}  // namespace penstock
