// State in less than 32 bits per number, without loss (split weights) and with it (8-bit moments): docs/numerics.md has
// the definitions, line by line as here. Compiled once per instruction set, like all that includes it.
#pragma once
#include "kernels.h"
#include "numbers.h"

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
    const uint32_t carried = lower[i] & 0x8000u;  // rounding has added it
    x[i] = float_of((static_cast<uint32_t>(upper[i].bits) << 16) + lower[i] - (carried << 1));
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

// 0..most, to nearest, ties to even; `most` of what is larger, infinite or no number.
INLINE int32_t rounded_code(float x, float most) {
  const float limited = x < most ? x : most;
  return static_cast<int32_t>(bits_of(limited + kRound) - bits_of(kRound));
}

constexpr size_t kTile = 256;  // elements that are decoded, updated and encoded at a time, in the first cache
constexpr size_t kTileGroups = kTile / kGroup;

// The scales of the groups of a tile, and what to multiply by; `valid` is -1, or 0 for a group whose codes are 0.
struct TileScales {
  alignas(64) float inverse[kTileGroups];
  alignas(64) int32_t valid[kTileGroups];
};

INLINE void find_scales(uint16_t* __restrict scales, TileScales& found, const float* __restrict x, size_t groups) {
  alignas(64) int32_t largest[kTileGroups];
  for (size_t g = 0; g < groups; ++g) {
    int32_t most = 0;
    for (size_t i = 0; i < kGroup; ++i) {
      const int32_t size = size_of(x[g * kGroup + i]);
      most = size > most ? size : most;
    }
    largest[g] = most;
  }
  for (size_t g = 0; g < groups; ++g) {
    const int32_t code = scale_of(largest[g]);
    scales[g] = static_cast<uint16_t>(code);
    found.inverse[g] = inverse_of_scale(code);
    found.valid[g] = code == 0 || code == kNotANumber ? 0 : -1;
  }
}

// x of one tile at most to codes of a first moment, with sign.
INLINE void encode_tile(int8_t* __restrict codes, uint16_t* __restrict scales, const float* __restrict x, size_t n) {
  TileScales of;
  find_scales(scales, of, x, n / kGroup);
  for (size_t g = 0; g < n / kGroup; ++g) {
    const float inverse = of.inverse[g];
    const int32_t valid = of.valid[g];
    const float* __restrict from = x + g * kGroup;
    int8_t* __restrict to = codes + g * kGroup;
    for (size_t i = 0; i < kGroup; ++i) {
      const float part = float_of(static_cast<uint32_t>(size_of(from[i]))) * inverse;
      const int32_t code = rounded_code(127.0f * ((part + part) / (1.0f + part)), 127.0f) & valid;
      const int32_t negative = static_cast<int32_t>(bits_of(from[i])) >> 31;
      to[i] = static_cast<int8_t>((code ^ negative) - negative);
    }
  }
}

INLINE void decode_tile(float* __restrict x, const int8_t* __restrict codes, const uint16_t* __restrict scales,
                        size_t n) {
  constexpr float step = 1.0f / 127.0f;
  for (size_t g = 0; g < n / kGroup; ++g) {
    const float scale = value_of_scale(scales[g]);
    const int8_t* __restrict from = codes + g * kGroup;
    float* __restrict to = x + g * kGroup;
    for (size_t i = 0; i < kGroup; ++i) {
      const int32_t code = from[i];
      const float y = static_cast<float>(code < 0 ? -code : code) * step;
      const float size = (y / (2.0f - y)) * scale;
      to[i] = float_of(bits_of(size) | (static_cast<uint32_t>(code) & 0x80000000u));
    }
  }
}

// x of one tile at most to codes of a second moment: of its roots.
INLINE void encode_tile(uint8_t* __restrict codes, uint16_t* __restrict scales, const float* __restrict x, size_t n) {
  alignas(64) float roots[kTile];
  for (size_t i = 0; i < n; ++i) roots[i] = __builtin_sqrtf(x[i]);
  TileScales of;
  find_scales(scales, of, roots, n / kGroup);
  for (size_t g = 0; g < n / kGroup; ++g) {
    const float inverse = of.inverse[g];
    const int32_t valid = of.valid[g];
    const float* from = roots + g * kGroup;
    uint8_t* __restrict to = codes + g * kGroup;
    for (size_t i = 0; i < kGroup; ++i)
      to[i] = static_cast<uint8_t>(rounded_code(255.0f * (from[i] * inverse), 255.0f) & valid);
  }
}

INLINE void decode_tile(float* __restrict x, const uint8_t* __restrict codes, const uint16_t* __restrict scales,
                        size_t n) {
  for (size_t g = 0; g < n / kGroup; ++g) {
    const float step = value_of_scale(scales[g]) * (1.0f / 255.0f);
    const uint8_t* __restrict from = codes + g * kGroup;
    float* __restrict to = x + g * kGroup;
    for (size_t i = 0; i < kGroup; ++i) {
      const float root = static_cast<float>(static_cast<int32_t>(from[i])) * step;
      to[i] = root * root;
    }
  }
}

}  // namespace
}  // namespace penstock
