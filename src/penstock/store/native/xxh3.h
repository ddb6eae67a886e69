// The checksum of a block: XXH3 with 64 bits and no seed, as xxHash specifies it (doc/xxhash_spec.md), of more than 240
// bytes; shorter inputs have another formula, and no block is as short. Python's xxhash gives the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

uint64_t xxh3_baseline(const void* memory, size_t nbytes);
uint64_t xxh3_avx2(const void* memory, size_t nbytes);

}  // namespace penstock
