// State in less than 32 bits per number, without loss (split weights) and with it (8-bit moments): docs/numerics.md has
// the definitions, line by line as here. Compiled once per instruction set, like all that includes it.
#pragma once
#include "kernels.h"
#include "numbers.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

// ---- fp32 in two halves: a bfloat16, rounded half-up, and the lower 16 bits

void split_range(BFloat16* __restrict upper, uint16_t* __restrict lower, const float* __restrict x, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(x[i]);
    upper[i] = {static_cast<uint16_t>(is_nan(u) ? 0x7fc0u : (u + 0x8000u) >> 16)};
    lower[i] = static_cast<uint16_t>(is_nan(u) ? 0u : u);
  }
}

void join_range(float* __restrict x, const BFloat16* __restrict upper, const uint16_t* __restrict lower, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const int32_t rest = static_cast<int16_t>(lower[i]);  // below zero where the upper half was rounded up
    x[i] = float_of((static_cast<uint32_t>(upper[i].bits) << 16) + static_cast<uint32_t>(rest));
  }
}

// ---- groups of 8-bit codes with one scale

constexpr int32_t kBelow = (127 - 48) << 10;  // what a scale's code is less than a float's upper 18 bits, without sign
constexpr int32_t kNotANumber = 0xffff;       // the scale of a group that has a NaN
constexpr float kRound = 12582912.0f;         // 1.5 * 2^23: in a sum with it, the last bits are a small number rounded

// The code of a group's scale: of the largest of its sizes, which as integers are in the same order as the numbers.
INLINE int32_t scale_of(int32_t largest) {
  const int32_t rounded = static_cast<int32_t>((static_cast<uint32_t>(largest) + 0xfffu + (largest >> 13 & 1)) >> 13);
  int32_t code = rounded - kBelow;
  code = code < 1 ? 1 : code;
  code = code > kNotANumber - 1 ? kNotANumber - 1 : code;
  code = largest == 0 ? 0 : code;
  return largest > 0x7f800000 ? kNotANumber : code;
}

INLINE float value_of_scale(int32_t code) {
  const uint32_t bits = static_cast<uint32_t>(code + kBelow) << 13;
  return float_of(code == 0 ? 0u : code == kNotANumber ? 0x7fc00000u : bits);
}

// What every size of a group is multiplied by. 0 where the group is all zeros or has a NaN: all its codes are 0.
INLINE float inverse_of_scale(int32_t code) {
  return code == 0 || code == kNotANumber ? 0.0f : 1.0f / value_of_scale(code);
}

INLINE int32_t size_of(float f) { return static_cast<int32_t>(bits_of(f) & 0x7fffffffu); }

// A size as part of its group's scale, at most 1, which has the largest code: rounding may have made the scale a little
// smaller, and none is above 2^16. As integers, which are in the same order, infinity, too.
INLINE float part_of(float size, float inverse) {
  const uint32_t part = bits_of(size * inverse), one = bits_of(1.0f);
  return float_of(static_cast<int32_t>(part) < static_cast<int32_t>(one) ? part : one);
}

// x of -127..255 to nearest, ties to even, in the last 8 bits.
INLINE uint32_t rounded_code(float x) { return bits_of(x + kRound); }

// What is particular to a moment; everything is of 32 bits here, the codes, too.
struct First {  // numbers of a first moment
  using Code = int8_t;
  static INLINE float factor(int32_t scale) { return value_of_scale(scale); }
  static INLINE float decoded(int32_t code, float factor) {
    const float y = static_cast<float>(code) * (1.0f / 127.0f);  // the sign goes through: rounding is symmetric
    return (y / (2.0f - float_of(static_cast<uint32_t>(size_of(y))))) * factor;
  }
  static INLINE uint32_t encoded(float x, float inverse) {  // the last 8 bits
    const float part = part_of(float_of(static_cast<uint32_t>(size_of(x))), inverse);
    const float code = 127.0f * ((part + part) / (1.0f + part));
    return rounded_code(float_of(bits_of(code) | (bits_of(x) & 0x80000000u)));
  }
};

struct Second {  // roots of a second moment are encoded, their squares decoded
  using Code = uint8_t;
  static INLINE float factor(int32_t scale) { return value_of_scale(scale) * (1.0f / 255.0f); }
  static INLINE float decoded(int32_t code, float factor) {
    const float root = static_cast<float>(code) * factor;
    return root * root;
  }
  static INLINE uint32_t encoded(float root, float inverse) {
    const uint32_t code = rounded_code(255.0f * part_of(root, inverse)), one = rounded_code(1.0f);
    return code > one ? code : one;
  }
};

constexpr size_t kTile = 256;  // elements that are decoded, updated and encoded at a time, in the first cache
constexpr size_t kTileGroups = kTile / kGroup;
using Tile = float[kTile];
using TileCodes = int32_t[kTile];
using TileSizes = int32_t[kTileGroups];  // the bits of the largest size of each group

// Codes between 8 bits and 32, one group at a time: compilers take many shuffles for that.
#if defined(__AVX512F__)
INLINE __m512i widened(const int8_t*, __m128i codes) { return _mm512_maskz_cvtepi8_epi32(0xffff, codes); }
INLINE __m512i widened(const uint8_t*, __m128i codes) { return _mm512_maskz_cvtepu8_epi32(0xffff, codes); }
#elif defined(__AVX2__)
INLINE __m256i widened(const int8_t*, __m128i codes) { return _mm256_cvtepi8_epi32(codes); }
INLINE __m256i widened(const uint8_t*, __m128i codes) { return _mm256_cvtepu8_epi32(codes); }
#endif

template <class C>
INLINE void widen_group(int32_t* __restrict to, const C* __restrict from) {
#if defined(__AVX512F__)
  for (size_t i = 0; i < kGroup; i += 16)
    _mm512_store_si512(to + i, widened(from, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#elif defined(__AVX2__)
  for (size_t i = 0; i < kGroup; i += 8)
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i),
                       widened(from, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i))));
#else
  for (size_t i = 0; i < kGroup; ++i) to[i] = from[i];
#endif
}

template <class C>
INLINE void narrow_group(C* __restrict to, const uint32_t* __restrict from) {  // the last 8 bits
#if defined(__AVX512F__)
  for (size_t i = 0; i < kGroup; i += 16)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_load_si512(from + i)));
#else
  for (size_t i = 0; i < kGroup; ++i) to[i] = static_cast<C>(from[i]);
#endif
}

template <class C>
INLINE void widen(TileCodes& to, const C* from, size_t n) {
  for (size_t at = 0; at < n; at += kGroup) widen_group(to + at, from + at);
}

INLINE void find_largest(TileSizes& largest, const float* __restrict x, size_t n) {
  for (size_t at = 0; at < n; at += kGroup) {
    int32_t most = 0;
    for (size_t i = 0; i < kGroup; ++i) {
      const int32_t size = size_of(x[at + i]);
      most = size > most ? size : most;
    }
    largest[at / kGroup] = most;
  }
}

// The scales of a tile's groups, and what to encode with.
struct TileScales {
  alignas(64) float inverse[kTileGroups];
  alignas(64) int32_t codes[kTileGroups];
};

INLINE void find_scales(TileScales& found, uint16_t* scales, const TileSizes& largest, size_t groups) {
  alignas(64) uint16_t narrow[kTileGroups];
  for (size_t g = 0; g < kTileGroups; ++g) {  // all of a tile, also where there are fewer: no remainder
    const int32_t code = scale_of(largest[g]);
    narrow[g] = static_cast<uint16_t>(code);
    found.inverse[g] = inverse_of_scale(code);
    found.codes[g] = code;
  }
  if (groups == kTileGroups) {
    memcpy(scales, narrow, sizeof narrow);
  } else {
    memcpy(scales, narrow, groups * sizeof(uint16_t));
  }
}

template <class M>
INLINE void encode_group(typename M::Code* codes, const float* __restrict x, const TileScales& scales, size_t g) {
  alignas(64) uint32_t wide[kGroup];
  for (size_t i = 0; i < kGroup; ++i) wide[i] = M::encoded(x[g * kGroup + i], scales.inverse[g]);
  narrow_group(codes + g * kGroup, wide);
  if (scales.codes[g] == 0 || scales.codes[g] == kNotANumber) memset(codes + g * kGroup, 0, kGroup);
}

// x of one tile at most, as M encodes it.
template <class M>
INLINE void encode_tile(typename M::Code* codes, uint16_t* scales, const float* x, const TileSizes& largest, size_t n) {
  TileScales found;
  find_scales(found, scales, largest, n / kGroup);
  for (size_t g = 0; g < n / kGroup; ++g) encode_group<M>(codes, x, found, g);
}

template <class M>
INLINE void decode_tile(float* __restrict x, const typename M::Code* codes, const uint16_t* scales, size_t n) {
  alignas(64) TileCodes wide;
  widen(wide, codes, n);
  for (size_t at = 0; at < n; at += kGroup) {
    const float factor = M::factor(scales[at / kGroup]);
    for (size_t i = at; i < at + kGroup; ++i) x[i] = M::decoded(wide[i], factor);
  }
}

}  // namespace
}  // namespace penstock
