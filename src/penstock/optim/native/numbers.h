// Numbers of 16 bits and how fp32 is rounded to them (docs/numerics.md). Included by what is compiled once per
// instruction set: everything is in an anonymous namespace and no standard template is used, as a copy compiled for a
// newer instruction set must never be the one the linker keeps for the baseline.
#pragma once
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace penstock {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
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

INLINE bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

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
  return {static_cast<uint16_t>(is_nan(u) ? 0x7fc0u : rounded)};
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

}  // namespace
}  // namespace penstock
