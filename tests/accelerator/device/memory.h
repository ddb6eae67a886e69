// The device's memory, which the host cannot touch, its caching allocator, and the host's page-locked memory.
//
// The same bytes are mapped twice: tensors have addresses that fault, and kernels use the other mapping.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "streams.h"

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
inline c10::Device the_device() { return c10::Device(kDevice, 0); }

inline char *g_shown = nullptr, *g_real = nullptr;
constexpr size_t kAddresses = size_t{64} << 30;

inline void map_memory() {
  int file = memfd_create("device", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kAddresses) == 0, "no memory file: ", strerror(errno));
  void* shown = mmap(nullptr, kAddresses, PROT_NONE, MAP_SHARED, file, 0);
  void* real = mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(shown != MAP_FAILED && real != MAP_FAILED, "the device's memory cannot be mapped: ", strerror(errno));
  g_shown = static_cast<char*>(shown), g_real = static_cast<char*>(real);
  close(file);
}
inline bool on_device(const void* address) {
  return address >= g_shown && address < g_shown + kAddresses;
}
inline void* real(const void* address) {
  if (!on_device(address)) return const_cast<void*>(address);
  return g_real + (static_cast<const char*>(address) - g_shown);
}

// ---- the allocator: as CUDA's, but that a block has one size for as long as it lives
struct Block {
  size_t offset, size;
  int stream;                  // whose order its uses are in
  std::vector<int> also_used;  // on other streams, as record_stream says
  std::vector<Event> pending;  // those uses, since it was freed
  Clock freed;                 // what the thread that freed it knew
};
struct Allocator final : c10::DeviceAllocator {
  std::mutex lock;
  std::map<void*, Block> live;
  std::map<std::pair<int, size_t>, std::vector<Block>> free_blocks;
  std::vector<Block> pending;
  std::map<size_t, size_t> gaps{{0, kAddresses}};  // of addresses: first byte -> size
  size_t allocated = 0, most_allocated = 0, reserved = 0, most_reserved = 0, limit = 0;

  static size_t rounded(size_t nbytes) { return std::max<size_t>(512, (nbytes + 511) / 512 * 512); }

  // Whoever uses it on another stream has to come after what its own has by then, be it fresh or long idle.
  void* take(size_t nbytes) {
    size_t size = rounded(nbytes);
    void* shown = take_block(size);
    enqueue(t_stream, "the first use of memory", {{shown, size, true}}, nullptr);
    return shown;
  }
  void* take_block(size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    reuse_what_is_over();
    auto& ready = free_blocks[{t_stream, size}];
    if (ready.empty() && reserved + size > limit) give_back();
    Block block;
    if (!ready.empty()) {
      block = std::move(ready.back());  // what was freed last: so mistakes show
      ready.pop_back();
    } else {
      if (reserved + size > limit) {
        count("out of memory");
        TORCH_CHECK_WITH(OutOfMemoryError, false, "the simulated device is out of memory: tried to allocate ", size,
                         " bytes of ", limit, ", ", allocated, " of them allocated and ", reserved, " reserved");
      }
      block = Block{addresses(size), size, t_stream, {}, {}, {}};
      poison(block);
      reserved += size;
      most_reserved = std::max(most_reserved, reserved);
    }
    know(block.freed);
    allocated += size;
    most_allocated = std::max(most_allocated, allocated);
    void* shown = g_shown + block.offset;
    live.emplace(shown, std::move(block));
    return shown;
  }
  size_t addresses(size_t size) {
    for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
      if (gap->second < size) continue;
      auto [begin, room] = *gap;
      gaps.erase(gap);
      if (room > size) gaps.emplace(begin + size, room - size);
      return begin;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the simulated device has no addresses left");
  }
  void free(void* shown) {
    std::unique_lock<std::mutex> guard(lock);
    auto entry = live.find(shown);
    Block block = std::move(entry->second);
    live.erase(entry);
    allocated -= block.size;
    guard.unlock();
    for (int s : block.also_used) record(block.pending.emplace_back(), s);
    block.also_used.clear();
    if (block.pending.empty()) poison(block);
    guard.lock();
    if (block.pending.empty()) free_blocks[{block.stream, block.size}].push_back(std::move(block));
    else pending.push_back(std::move(block));
    t_found.clear();  // Python cannot be asked where: it may be freeing this for an error that it is about to raise
  }
  // Freed memory is another's, and what nobody has had has no values: from here on, in the order of its stream, it
  // holds NaN. What whoever frees it knows is handed to whoever is given it, and to nobody else.
  static void poison(Block& block) {
    char* to = g_real + block.offset;
    size_t size = block.size;
    HostThread& thread = here();
    std::lock_guard<std::mutex> guard(g_lock);
    Stream& stream = g_streams[block.stream];
    thread.tell(block.freed);
    Clock known = stream.clock;
    join(known, block.freed);
    place_task(stream, Task{[to, size] { memset(to, 0xff, size); }}, known, "the next use of memory that was freed",
               {{g_shown + block.offset, size, true}}, thread.label);
  }
  void reuse_what_is_over() {
    for (size_t i = 0; i < pending.size();) {
      Block& block = pending[i];
      if (!std::all_of(block.pending.begin(), block.pending.end(), is_over)) {
        i++;
        continue;
      }
      block.pending.clear();
      poison(block);
      free_blocks[{block.stream, block.size}].push_back(std::move(block));
      if (i + 1 < pending.size()) block = std::move(pending.back());
      pending.pop_back();
    }
  }
  void give_back() {  // waits for everything, as CUDA's does
    drain_all();
    reuse_what_is_over();
    drain_all();
    for (auto& [_, blocks] : free_blocks) {
      for (Block& block : blocks) {
        reserved -= block.size;
        constexpr size_t page = 4096;
        size_t begin = (block.offset + page - 1) / page * page, end = (block.offset + block.size) / page * page;
        if (begin < end) madvise(g_real + begin, end - begin, MADV_REMOVE);  // pages that are shared stay: of the living
        std::lock_guard<std::mutex> guard(g_lock);
        forget(g_shown + block.offset, block.size);
        add_gap(block.offset, block.size);
      }
      blocks.clear();
    }
  }
  void add_gap(size_t begin, size_t size) {
    auto after = gaps.lower_bound(begin);
    if (after != gaps.end() && begin + size == after->first) {
      size += after->second;
      after = gaps.erase(after);
    }
    if (after != gaps.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == begin) {
        before->second += size;
        return;
      }
    }
    gaps.emplace(begin, size);
  }
  void used_on(void* shown, int s) {
    std::lock_guard<std::mutex> guard(lock);
    auto entry = live.find(shown);
    if (entry != live.end() && entry->second.stream != s) entry->second.also_used.push_back(s);
  }

  static void deleter(void* shown);
  c10::DataPtr allocate(size_t nbytes) override {
    void* shown = nbytes ? take(nbytes) : nullptr;
    return {shown, shown, &deleter, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, size_t n) const override {
    enqueue(t_stream, "copy of memory", {{to, n, true}, {from, n, false}}, [=] { memcpy(real(to), real(from), n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> guard(lock);
    give_back();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    used_on(pointer.get_context(), static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated, stats.allocated_bytes[0].peak = most_allocated;
    stats.reserved_bytes[0].current = reserved, stats.reserved_bytes[0].peak = most_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(lock);
    most_allocated = allocated, most_reserved = reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(lock);
    return {limit - reserved, limit};
  }
};
inline Allocator& allocator() {
  static auto& one = immortal<Allocator>();
  return one;
}
inline void Allocator::deleter(void* shown) {
  if (shown) allocator().free(shown);
}

// ---- page-locked host memory
inline auto& g_pages_lock = immortal<std::mutex>();
inline auto& g_pages = immortal<std::map<const char*, size_t>>();
constexpr int kAlreadyLocked = 712, kNotLocked = 713;  // as CUDA numbers them

inline bool is_locked(const void* address, size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_pages_lock);
  auto first = static_cast<const char*>(address);
  auto after = g_pages.upper_bound(first);
  if (after == g_pages.begin()) return false;
  auto [begin, size] = *std::prev(after);
  return first + nbytes <= begin + size;
}
inline size_t locked_at(const void* address) {  // bytes of what begins there; 0: nothing does
  std::lock_guard<std::mutex> guard(g_pages_lock);
  auto entry = g_pages.find(static_cast<const char*>(address));
  return entry == g_pages.end() ? 0 : entry->second;
}
inline int lock_pages(const void* address, size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_pages_lock);
  auto first = static_cast<const char*>(address);
  auto after = g_pages.lower_bound(first + nbytes);
  if (after != g_pages.begin()) {
    auto [begin, size] = *std::prev(after);
    if (begin + size > first) return kAlreadyLocked;
  }
  g_pages.emplace(first, nbytes);
  return 0;
}
inline int unlock_pages(const void* address) {
  size_t nbytes;
  {
    std::lock_guard<std::mutex> guard(g_pages_lock);
    auto entry = g_pages.find(static_cast<const char*>(address));
    if (entry == g_pages.end()) return kNotLocked;
    nbytes = entry->second;
    g_pages.erase(entry);
  }
  drain_all();  // as CUDA does
  std::lock_guard<std::mutex> guard(g_lock);
  forget(address, nbytes);
  return 0;
}
struct PinnedAllocator final : c10::Allocator {  // of Tensor.pin_memory()
  c10::DataPtr allocate(size_t nbytes) override {
    void* made = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&made, 4096, nbytes) == 0, "no memory");
      lock_pages(made, nbytes);
    }
    return {made, made, &deleter, c10::Device(c10::DeviceType::CPU)};
  }
  static void deleter(void* made) {
    if (made) unlock_pages(made);
    ::free(made);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};

}  // namespace sim
