// Streams that run late, and events. One thread is the device: it does what somebody waits for, and otherwise nothing,
// or, with patience, anything that may run, at a random moment.
#pragma once
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "clocks.h"

namespace sim {

using Time = std::chrono::steady_clock;

struct Task {
  std::function<void()> run;  // empty for a wait
  int other = -1;             // the stream that is waited for, until
  uint64_t until = 0;         // so much of it is done
  std::shared_ptr<bool> open = {};  // a gate: false until a host thread opens it
  Time::time_point due;
};
struct Stream {
  std::deque<Task> tasks;
  uint64_t queued = 0, done = 0;
  uint64_t demand = 0;  // somebody waits until so much is done
  Clock clock;
};
inline auto& g_streams = immortal<std::array<Stream, kStreams>>();  // guarded by g_lock
inline std::atomic<int> g_next_stream{0};
inline std::atomic<double> g_patience_us{-1};  // most that a task waits unasked; negative: until somebody waits for it
inline std::mt19937_64 g_random{0};
inline auto &g_wake = immortal<std::condition_variable>(), &g_finished = immortal<std::condition_variable>();
inline auto& g_errors = immortal<std::vector<std::string>>();  // of tasks, until the host hears of them
inline thread_local int t_stream = 0;

inline int new_stream() { return 1 + g_next_stream++ % (kStreams - 1); }

// ---- the device
inline bool may_run(const Task& task) {
  return (!task.open || *task.open) && (task.other < 0 || g_streams[task.other].done >= task.until);
}

inline int choose(Time::time_point& next) {  // a stream whose next task runs now; -1: none, before `next`
  std::array<int, kStreams> ready{};
  int found = 0;
  for (bool again = true; again;) {  // who waits for another stream wants that to run
    again = false;
    for (Stream& stream : g_streams) {
      if (stream.demand <= stream.done || may_run(stream.tasks.front()) || stream.tasks.front().open) continue;
      Stream& other = g_streams[stream.tasks.front().other];
      if (other.demand < stream.tasks.front().until) other.demand = stream.tasks.front().until, again = true;
    }
  }
  auto now = Time::now();
  next = Time::time_point::max();
  for (int s = 0; s < kStreams; s++) {
    Stream& stream = g_streams[s];
    if (stream.tasks.empty() || !may_run(stream.tasks.front())) continue;
    if (stream.demand > stream.done || stream.tasks.front().due <= now) ready[found++] = s;
    else next = std::min(next, stream.tasks.front().due);
  }
  return found ? ready[g_random() % found] : -1;
}
inline void work() {
  std::unique_lock<std::mutex> guard(g_lock);
  while (true) {
    Time::time_point next;
    int s = choose(next);
    if (s < 0) {
      if (next == Time::time_point::max()) g_wake.wait(guard);
      else g_wake.wait_until(guard, next);
      continue;
    }
    Stream& stream = g_streams[s];
    Task task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    if (task.run) {
      guard.unlock();
      std::string error;
      try {
        task.run();
      } catch (const std::exception& e) {
        error = e.what();
      }
      task.run = nullptr;  // what it holds goes before whoever waits for it goes on
      guard.lock();
      if (!error.empty()) g_errors.push_back(error);
    }
    stream.done++;
    if (stream.done <= stream.demand) g_finished.notify_all();  // who waits for less may open a gate before the rest
  }
}
inline void start_device() { std::thread(work).detach(); }

// ---- what the host does with streams
struct Touch {
  const void* address;
  size_t nbytes;
  bool writes;
};
// With g_lock held. `clock`: what is known to be over when the task runs.
inline uint64_t place_task(Stream& stream, Task task, const Clock& clock, const std::string& what,
                           const std::vector<Touch>& touches, uint32_t label) {
  int place = static_cast<int>(&stream - g_streams.data());
  uint64_t when = ++stream.queued;
  at(stream.clock, place) = when;
  Access now{place, when, g_names.id(what), label};
  for (bool writes : {false, true})
    for (const Touch& t : touches)
      if (t.writes == writes) touch(t.address, t.nbytes, writes, now, clock);
  double most = g_patience_us;
  task.due = most < 0 ? Time::time_point::max()
                      : Time::now() + std::chrono::microseconds(static_cast<int64_t>(most * (g_random() % 1024) / 1024));
  stream.tasks.push_back(std::move(task));
  if (most >= 0) g_wake.notify_all();
  return when;
}
inline void enqueue(int s, const std::string& what, const std::vector<Touch>& touches, std::function<void()> run) {
  HostThread& thread = here();
  {
    std::lock_guard<std::mutex> guard(g_lock);
    Stream& stream = g_streams[s];
    thread.tell(stream.clock);
    at(stream.clock, s) = stream.queued + 1;
    place_task(stream, Task{std::move(run)}, stream.clock, what, touches, thread.label);
  }
  end_of_call();
}
inline void wait_until(int s, uint64_t until) {
  std::unique_lock<std::mutex> guard(g_lock);
  Stream& stream = g_streams[s];
  if (stream.done >= until) return;
  stream.demand = std::max(stream.demand, until);
  g_wake.notify_all();
  g_finished.wait(guard, [&] { return stream.done >= until; });
}
inline void raise_errors() {
  std::vector<std::string> errors;
  {
    std::lock_guard<std::mutex> guard(g_lock);
    errors.swap(g_errors);
  }
  TORCH_CHECK(errors.empty(), "a kernel of the simulated device failed: ", errors[0]);
}
inline void know(const Clock& clock) {
  std::lock_guard<std::mutex> guard(g_lock);
  join(here().clock, clock);
}
inline void drain(int s) {  // what has failed is told later
  uint64_t until;
  Clock clock;
  {
    std::lock_guard<std::mutex> guard(g_lock);
    until = g_streams[s].queued, clock = g_streams[s].clock;
  }
  wait_until(s, until);
  know(clock);
}
inline void drain_all() {
  for (int s = 0; s < kStreams; s++) drain(s);
}
inline void synchronize_stream(int s) {
  count("host waits: for a stream");
  drain(s);
  raise_errors();
}
inline void synchronize_all() {
  count("host waits: for the device");
  drain_all();
  raise_errors();
}

// ---- events
struct Event {
  int stream = -1;  // not recorded yet
  uint64_t until = 0;
  Clock clock;
  std::shared_ptr<std::atomic<double>> ms = std::make_shared<std::atomic<double>>(0);
};
inline double now_ms() { return std::chrono::duration<double, std::milli>(Time::now().time_since_epoch()).count(); }

inline void record(Event& event, int s) {
  HostThread& thread = here();
  std::lock_guard<std::mutex> guard(g_lock);
  Stream& stream = g_streams[s];
  thread.tell(stream.clock);
  event.ms = std::make_shared<std::atomic<double>>(0);
  if (stream.done == stream.queued) {  // nothing is before it: it is over
    at(stream.clock, s) = ++stream.queued;
    stream.done++;
    *event.ms = now_ms();
  } else {
    auto ms = event.ms;
    place_task(stream, Task{[ms] { *ms = now_ms(); }}, stream.clock, "event", {}, thread.label);
  }
  event.stream = s, event.until = stream.queued, event.clock = stream.clock;
}
inline void wait_event(const Event& event, int s) {
  if (event.stream < 0 || event.stream == s) return;
  HostThread& thread = here();
  std::lock_guard<std::mutex> guard(g_lock);
  Stream& stream = g_streams[s];
  thread.tell(stream.clock);
  join(stream.clock, event.clock);
  place_task(stream, Task{nullptr, event.stream, event.until}, stream.clock, "wait", {}, thread.label);
}
inline bool is_over(const Event& event) {
  if (event.stream < 0) return true;
  std::lock_guard<std::mutex> guard(g_lock);
  if (g_streams[event.stream].done < event.until) return false;
  join(here().clock, event.clock);
  return true;
}
inline void synchronize_event(const Event& event) {
  if (event.stream < 0) return;
  count("host waits: for an event");
  wait_until(event.stream, event.until);
  know(event.clock);
  raise_errors();
}

// ---- gates: a stream goes on when a host thread lets it
inline auto& g_gates = immortal<std::map<uint64_t, std::shared_ptr<bool>>>();  // guarded by g_lock
inline uint64_t g_last_gate = 0;

inline uint64_t close_gate(int s) {
  HostThread& thread = here();
  std::lock_guard<std::mutex> guard(g_lock);
  Stream& stream = g_streams[s];
  thread.tell(stream.clock);
  auto open = g_gates.emplace(++g_last_gate, std::make_shared<bool>(false)).first->second;
  place_task(stream, Task{nullptr, -1, 0, open}, stream.clock, "gate", {}, thread.label);
  return g_last_gate;
}
inline void open_gate(uint64_t gate) {
  std::lock_guard<std::mutex> guard(g_lock);
  auto entry = g_gates.find(gate);
  if (entry == g_gates.end()) return;
  *entry->second = true;
  g_gates.erase(entry);
  g_wake.notify_all();
}

}  // namespace sim
