// One object per instruction set from this source (CMakeLists.txt), with the same numbers by each.
#include "xxh3.h"

#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;

constexpr int LANES = 8;               // accumulators of 64 bits
constexpr size_t STRIPE = 64;          // bytes that all of them take in at once
constexpr size_t BLOCK = 16 * STRIPE;  // bytes after which they are scrambled

// The specification's default secret. Each stripe of a block begins eight bytes further on in it.
alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr size_t LAST_SECRET = sizeof SECRET - STRIPE;

inline uint64_t read64(const uint8_t* from) {  // the processors that this is built for are little-endian
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

// A stripe, taken in: each lane has the product of the halves of its part xor the secret, and its neighbour's part.
#if defined(__AVX2__)
inline void take_in(uint64_t* lanes, const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < LANES / 4; ++i) {
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stripe) + i);
        const __m256i key = _mm256_xor_si256(part, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i));
        const __m256i product = _mm256_mul_epu32(key, _mm256_shuffle_epi32(key, 0x31));
        const __m256i sum = _mm256_add_epi64(product, _mm256_shuffle_epi32(part, 0x4E));
        __m256i* const lane = reinterpret_cast<__m256i*>(lanes) + i;
        _mm256_store_si256(lane, _mm256_add_epi64(_mm256_load_si256(lane), sum));
    }
}
#else
inline void take_in(uint64_t* lanes, const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < LANES; ++i) {
        const uint64_t key = read64(stripe + 8 * i) ^ read64(secret + 8 * i);
        lanes[i] += read64(stripe + 8 * (i ^ 1)) + (key & 0xFFFFFFFFu) * (key >> 32);
    }
}
#endif

inline void scramble(uint64_t* lanes) {
    for (int i = 0; i < LANES; ++i) {
        const uint64_t value = lanes[i] ^ (lanes[i] >> 47) ^ read64(SECRET + LAST_SECRET + 8 * i);
        lanes[i] = value * PRIME32_1;
    }
}

inline uint64_t folded(uint64_t x, uint64_t y) {
    const unsigned __int128 product = static_cast<unsigned __int128>(x) * y;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

uint64_t PENSTOCK_XXH3(const void* memory, size_t nbytes) {
    const uint8_t* at = static_cast<const uint8_t*>(memory);
    const uint8_t* const end = at + nbytes;
    alignas(64) uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                         PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    for (size_t blocks = (nbytes - 1) / BLOCK; blocks > 0; --blocks, at += BLOCK) {
        for (size_t i = 0; i < BLOCK / STRIPE; ++i) take_in(lanes, at + i * STRIPE, SECRET + 8 * i);
        scramble(lanes);
    }
    for (size_t i = 0; at + STRIPE < end; ++i, at += STRIPE) take_in(lanes, at, SECRET + 8 * i);
    take_in(lanes, end - STRIPE, SECRET + LAST_SECRET - 7);

    uint64_t result = nbytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) {
        const uint8_t* const secret = SECRET + 11 + 8 * i;
        result += folded(lanes[i] ^ read64(secret), lanes[i + 1] ^ read64(secret + 8));
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9u;
    return result ^ (result >> 32);
}

}  // namespace penstock
