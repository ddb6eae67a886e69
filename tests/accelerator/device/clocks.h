// Who touches which memory, and what orders them: vector clocks, as in FastTrack (Flanagan and Freund, 2009).
//
// Every stream and every host thread has a place in the clocks. A race is two accesses to the same bytes, one of them a
// write and one of them a stream's, of which neither is known to be over when the other begins; it is found whatever
// the timing was. What one host thread has to do with another alone is not looked at.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

// Threads, and tensors of Python's, outlive static variables: what they use is never destroyed.
template <typename T>
T& immortal() {
  return *new T;
}

using Clock = std::vector<uint64_t>;  // place -> how much of what is done there is known to be over

inline auto& g_lock = immortal<std::mutex>();  // guards clocks, accesses and the streams' queues

inline uint64_t& at(Clock& clock, size_t place) {
  if (clock.size() <= place) clock.resize(place + 1);
  return clock[place];
}
inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

// ---- places
constexpr int kStreams = 33;  // the default one, and a pool as large as CUDA's in torch; host threads come after them

inline bool is_stream(int place) { return place < kStreams; }

struct HostThread;
struct Places {  // of host threads; one that has ended leaves its place to another
  std::mutex lock;  // may be taken with g_lock held
  std::vector<HostThread*> threads;
  Clock given;  // to autograd's threads, by who has called backward last
  std::vector<int> free;
  std::vector<uint64_t> last;
  int take(uint64_t& begin) {
    std::lock_guard<std::mutex> guard(lock);
    if (free.empty()) {
      last.push_back(0);
      free.push_back(kStreams + static_cast<int>(last.size()) - 1);
    }
    int place = free.back();
    free.pop_back();
    begin = last[place - kStreams] + 1;
    return place;
  }
  void give(int place, uint64_t end) {
    std::lock_guard<std::mutex> guard(lock);
    last[place - kStreams] = end;
    free.push_back(place);
  }
};
inline auto& g_places = immortal<Places>();

struct HostThread {
  int place;
  Clock clock;
  uint32_t label = 0;    // the op under way, as the engine names it
  bool watched = false;  // somebody says what orders it; nobody does of autograd's threads
  HostThread() {
    uint64_t begin = 0;
    place = g_places.take(begin);
    std::lock_guard<std::mutex> guard(g_places.lock);
    g_places.threads.push_back(this);
    clock = g_places.given;
    at(clock, place) = begin;
  }
  ~HostThread() {
    {
      std::lock_guard<std::mutex> guard(g_places.lock);
      g_places.threads.erase(std::find(g_places.threads.begin(), g_places.threads.end(), this));
    }
    g_places.give(place, clock[place]);
  }
  void tell(Clock& other) {  // what this thread has done so far comes before what follows there
    join(other, clock);
    clock[place]++;
  }
};
inline HostThread& here() {
  thread_local HostThread thread;
  return thread;
}

// ---- names of what is done
struct Names {
  std::unordered_map<std::string, uint32_t> ids{{"", 0}};
  std::vector<std::string> names{""};
  uint32_t id(const std::string& name) {
    auto [entry, fresh] = ids.try_emplace(name, static_cast<uint32_t>(names.size()));
    if (fresh) names.push_back(name);
    return entry->second;
  }
};
inline auto& g_names = immortal<Names>();  // guarded by g_lock

inline std::string label() {  // of the calling thread; not with g_lock held
  uint32_t id = here().label;
  std::lock_guard<std::mutex> guard(g_lock);
  return g_names.names[id];
}

// ---- findings, and counts of what is worth counting
struct Finding {
  std::string what, where;
};
inline auto& g_findings_lock = immortal<std::mutex>();
inline auto& g_findings = immortal<std::vector<std::shared_ptr<Finding>>>();
inline thread_local std::vector<std::shared_ptr<Finding>> t_found;  // by the calling thread, and not said where yet
inline void (*g_ask_where)() = nullptr;                             // which tells us by `say_where`, in this thread
inline auto& g_counts = immortal<std::map<std::string, int64_t>>();
constexpr size_t kMostFindings = 200;

inline void count(const std::string& what, int64_t n = 1) {
  std::lock_guard<std::mutex> guard(g_findings_lock);
  g_counts[what] += n;
}
inline void find(const std::string& what) {
  std::lock_guard<std::mutex> guard(g_findings_lock);
  g_counts["findings"]++;
  if (g_findings.size() == kMostFindings || (!g_findings.empty() && g_findings.back()->what == what)) return;
  t_found.push_back(g_findings.emplace_back(std::make_shared<Finding>(Finding{what, {}})));
}
inline void say_where(const std::string& where) {
  std::lock_guard<std::mutex> guard(g_findings_lock);
  for (auto& each : t_found) each->where = where;
}
// At the end of a call in which something may have been found, with no lock held: who is asked is Python.
inline void end_of_call() {
  if (t_found.empty()) return;
  if (g_ask_where) g_ask_where();
  t_found.clear();
}

// ---- accesses
struct Access {
  int place = 0;
  uint64_t when = 0;  // 0: none
  uint32_t what = 0, label = 0;
};
struct Range {  // of bytes of which the same is known
  size_t end;
  Access write;
  std::vector<Access> reads;  // since the write, one for each place
};
inline auto& g_ranges = immortal<std::map<size_t, Range>>();  // by the first byte

inline std::string describe(const Access& access) {
  std::string who = is_stream(access.place) ? "stream " + std::to_string(access.place)
                                            : "host thread " + std::to_string(access.place - kStreams);
  std::string label = access.label ? " in " + g_names.names[access.label] : "";
  return g_names.names[access.what] + label + " on " + who;
}
inline void compare(const Access& earlier, bool earlier_writes, const Access& now, bool writes, const Clock& known,
                    size_t nbytes) {
  if (!earlier.when || (earlier_writes == false && !writes)) return;
  if (!is_stream(earlier.place) && !is_stream(now.place)) return;
  if (static_cast<size_t>(earlier.place) < known.size() && earlier.when <= known[earlier.place]) return;
  find(std::string(writes ? "write" : "read") + " by " + describe(now) + ", not ordered after the " +
       (earlier_writes ? "write" : "read") + " by " + describe(earlier) + " (of " + std::to_string(nbytes) + " bytes)");
}
inline void cut(size_t where) {  // so that a range begins here, if one reaches over it
  auto entry = g_ranges.upper_bound(where);
  if (entry == g_ranges.begin()) return;
  --entry;
  if (entry->first >= where || entry->second.end <= where) return;
  Range rest = entry->second;
  entry->second.end = where;
  g_ranges.emplace(where, std::move(rest));
}
// With g_lock held. `known`: the clock of who does it, with its own place.
inline void touch(const void* address, size_t nbytes, bool writes, const Access& now, const Clock& known) {
  if (!nbytes) return;
  size_t begin = reinterpret_cast<size_t>(address), end = begin + nbytes;
  cut(begin);
  cut(end);
  auto first = g_ranges.lower_bound(begin), last = g_ranges.lower_bound(end);
  for (auto entry = first; entry != last; ++entry) {
    compare(entry->second.write, true, now, writes, known, nbytes);
    if (writes)
      for (const Access& read : entry->second.reads) compare(read, false, now, true, known, nbytes);
  }
  if (writes) {
    g_ranges.erase(first, last);
    g_ranges.emplace(begin, Range{end, now, {}});
    return;
  }
  size_t next = begin;
  for (auto entry = first; next < end;) {
    if (entry == last || entry->first > next) {  // nothing is known of the bytes up to there
      size_t stop = entry == last ? end : entry->first;
      g_ranges.emplace_hint(entry, next, Range{stop, {}, {now}});
      next = stop;
      continue;
    }
    auto& reads = entry->second.reads;
    auto mine = std::find_if(reads.begin(), reads.end(), [&](const Access& read) { return read.place == now.place; });
    if (mine == reads.end()) reads.push_back(now);
    else *mine = now;
    next = entry->second.end;
    ++entry;
  }
}
inline void forget(const void* address, size_t nbytes) {
  size_t begin = reinterpret_cast<size_t>(address), end = begin + nbytes;
  cut(begin);
  cut(end);
  g_ranges.erase(g_ranges.lower_bound(begin), g_ranges.lower_bound(end));
}

// ---- what orders host threads, as whoever made them wait for each other says
inline auto& g_told = immortal<std::unordered_map<uint64_t, Clock>>();

inline void tell(uint64_t key) {
  std::lock_guard<std::mutex> guard(g_lock);
  here().watched = true;
  here().tell(g_told[key]);
}
inline void hear(uint64_t key) {
  std::lock_guard<std::mutex> guard(g_lock);
  here().watched = true;
  auto entry = g_told.find(key);
  if (entry != g_told.end()) join(here().clock, entry->second);
}
// A backward begins or ends: what autograd's threads do is done for the calling thread.
inline void meet_autograd() {
  HostThread& me = here();
  std::lock_guard<std::mutex> guard(g_lock);
  std::lock_guard<std::mutex> all(g_places.lock);
  for (HostThread* thread : g_places.threads) {
    if (thread == &me || thread->watched) continue;
    thread->tell(me.clock);
    join(thread->clock, me.clock);
  }
  me.tell(g_places.given);
}
inline void host_access(const void* address, size_t nbytes, bool writes, const char* what) {
  HostThread& thread = here();
  {
    std::lock_guard<std::mutex> guard(g_lock);
    Access now{thread.place, thread.clock[thread.place], g_names.id(what), thread.label};
    touch(address, nbytes, writes, now, thread.clock);
  }
  end_of_call();
}

}  // namespace sim
