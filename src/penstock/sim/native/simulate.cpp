// The discrete-event simulation of all ranks' lanes that ``sim/simulate.py`` describes. For ctypes.
//
// Every number is made by the same operations of double precision in the same order as in ``tests/sim/events.py``, so
// that the bits are those of Python: no contraction, no reassociation (CMakeLists.txt). What is wrong with a world is
// not said here: the caller has it checked.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <queue>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int LANES = 10;

// A list for each of so many things, one behind the other: those of i are values[begins[i]] up to values[begins[i + 1]].
struct Lists {
    const int32_t* begins;
    const int32_t* values;

    const int32_t* begin(int64_t i) const { return values + begins[i]; }
    const int32_t* end(int64_t i) const { return values + begins[i + 1]; }
};

// One schedule (``Template``).
struct Schedule {
    int64_t ops, lanes, pools;
    const int32_t* lane;
    const int32_t* missing;
    const int32_t* collective;  // its number in the world, -1: none
    const int32_t* channel;     // of a send, -1: none
    const int32_t* micro_batch;
    const int32_t* free;        // by pool
    const double* seconds;
    Lists queues, dependents, takes, gives;
    Lists recvs;                // by channel that comes in, ops in ascending order of their micro-batches
};

// How lanes of a rank slow each other down (``Costs``).
struct Costs {
    int64_t sharing;
    const int32_t* widths;
    const double* slows;  // LANES x LANES
};

// A rank, and where each channel that goes out of it arrives.
struct Place {
    int64_t schedule, costs;
    const int32_t* to;  // (rank, channel) of each channel, -1: nobody receives it
};

// What a lane stood idle for: an op of a rank, and the pool that it gave a buffer back to or -1. rank -1: nothing.
struct Trigger {
    int32_t rank, op, pool;
};

struct World {
    int64_t schedule_count, cost_count, rank_count, collective_count;
    const Schedule* schedules;
    const Costs* costs;
    const Place* ranks;
    const int32_t* members;  // ranks that meet in each collective
    // out: by rank and op, one rank behind the other
    double* starts;
    double* takes;
    double* ends;
    double* waits;
    Trigger* causes;
};

using Counts = std::array<int32_t, LANES>;
using Speeds = std::array<double, LANES>;

class Pace {
public:
    explicit Pace(const Costs& costs) : sharing(costs.sharing), widths(costs.widths), slows_(costs.slows) {}

    // The speed of each lane's ops, with so many of each lane under way.
    const Speeds* speeds(const Counts& counts) {
        auto found = speeds_.find(counts);
        if (found != speeds_.end()) return &found->second;
        Speeds made{};
        for (int lane = 0; lane < LANES; lane++) {
            if (!counts[lane]) continue;
            double slower = 0.0;
            for (int b = 0; b < LANES; b++)
                if (counts[b] && b != lane) slower += slows_[lane * LANES + b];
            made[lane] = 1.0 / (counts[lane] * (1.0 + slower));
        }
        return &speeds_.emplace(counts, made).first->second;
    }

    const bool sharing;
    const int32_t* const widths;

private:
    const double* const slows_;
    std::map<Counts, Speeds> speeds_;  // whose nodes stay where they are
};

struct Rank {
    Rank(int32_t index, int64_t offset, const Schedule& schedule, Pace& pace, const int32_t* to)
        : index(index), offset(offset), t(&schedule), pace(&pace), to(to),
          missing(schedule.missing, schedule.missing + schedule.ops), free(schedule.free, schedule.free + schedule.pools),
          starving(schedule.pools), finished(schedule.ops) {}

    int32_t index;
    int64_t offset;
    const Schedule* t;
    Pace* pace;
    const int32_t* to;
    std::vector<int32_t> missing, free;
    std::vector<uint16_t> starving;  // by pool, a bit for each lane whose next op wants a buffer of it
    std::vector<uint8_t> finished;
    std::array<int32_t, LANES> next{}, in_flight{}, published{};
    std::array<bool, LANES> arrived{};
    std::array<double, LANES> idle_since{};
    std::vector<std::pair<int32_t, double>> active;  // op, and work left, in the order of their starts
    Counts counts{};
    const Speeds* speeds = nullptr;  // with these counts, once they are asked for
    int64_t done = 0, version = 0;
    double now = 0.0;  // the moment that ``active`` is true of
    bool advancing = false;
};

struct Event {
    double time;
    int64_t sequence;
    int32_t rank, op;  // op -1: the next one of those that share
    int64_t version;

    bool operator>(const Event& other) const {
        return time != other.time ? time > other.time : sequence > other.sequence;
    }
};

class Run {
public:
    explicit Run(const World& world) : world_(world), waiting_(world.collective_count) {
        for (int64_t i = 0; i < world.cost_count; i++) paces_.emplace_back(new Pace(world.costs[i]));
        int64_t offset = 0;
        ranks_.reserve(world.rank_count);
        for (int64_t r = 0; r < world.rank_count; r++) {
            const Place& place = world.ranks[r];
            const Schedule& schedule = world.schedules[place.schedule];
            ranks_.emplace_back(static_cast<int32_t>(r), offset, schedule, *paces_[place.costs], place.to);
            offset += schedule.ops;
        }
    }

    // Whether all ops are done.
    bool go() {
        for (Rank& rank : ranks_)
            for (int lane = 0; lane < rank.t->lanes; lane++) start_lane(rank, lane, 0.0, NOTHING);
        while (!events_.empty() && !lost_) {
            const Event event = events_.top();
            events_.pop();
            Rank& rank = ranks_[event.rank];
            if (event.op >= 0)
                end(rank, event.op, event.time);
            else if (event.version == rank.version)
                advance(rank, event.time);
        }
        return !lost_ && std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.done == r.t->ops; });
    }

private:
    static constexpr Trigger NOTHING{-1, -1, -1};

    // ---- starting

    void start_lane(Rank& rank, int lane, double now, Trigger trigger) {
        const Schedule& t = *rank.t;
        const int32_t* queue = t.queues.begin(lane);
        const auto length = static_cast<int32_t>(t.queues.end(lane) - queue);
        while (rank.next[lane] < length && rank.in_flight[lane] < rank.pace->widths[lane] && !rank.arrived[lane]) {
            const int32_t i = queue[rank.next[lane]];
            if (rank.missing[i] || !take(rank, lane, i)) return;
            world_.takes[rank.offset + i] = now;
            if (t.collective[i] >= 0) {
                rank.arrived[lane] = true;
                arrive(rank, i, now, trigger);
            } else {
                start(rank, lane, i, now, trigger);
            }
        }
    }

    static bool take(Rank& rank, int lane, int32_t i) {
        const int32_t *first = rank.t->takes.begin(i), *last = rank.t->takes.end(i);
        bool enough = true;
        for (const int32_t* pool = first; pool != last; pool++) rank.free[*pool]--;
        for (const int32_t* pool = first; pool != last; pool++) enough = enough && rank.free[*pool] >= 0;
        if (enough) return true;
        for (const int32_t* pool = first; pool != last; pool++)
            if (rank.free[*pool] < 0) rank.starving[*pool] |= static_cast<uint16_t>(1 << lane);
        for (const int32_t* pool = first; pool != last; pool++) rank.free[*pool]++;
        return false;
    }

    void arrive(Rank& rank, int32_t i, double now, Trigger trigger) {
        const int32_t which = rank.t->collective[i];
        auto& here = waiting_[which];
        here.emplace_back(rank.index, i);
        if (static_cast<int32_t>(here.size()) < world_.members[which]) return;
        const auto met = std::move(here);
        here.clear();
        for (const auto& [index, j] : met) {
            Rank& member = ranks_[index];
            const int lane = member.t->lane[j];
            member.arrived[lane] = false;
            start(member, lane, j, now, index == rank.index ? trigger : Trigger{rank.index, i, -1});
        }
    }

    void start(Rank& rank, int lane, int32_t i, double now, Trigger trigger) {
        const int64_t at = rank.offset + i;
        world_.starts[at] = now;
        if (!rank.in_flight[lane] && now > rank.idle_since[lane]) {
            world_.waits[at] = now - rank.idle_since[lane];
            world_.causes[at] = trigger;
        }
        rank.next[lane]++;
        rank.in_flight[lane]++;
        if (rank.pace->sharing) {
            progress(rank, now);
            rank.active.emplace_back(i, rank.t->seconds[i]);
            count(rank, lane, 1);
            if (!rank.advancing) plan_next(rank);
        } else {
            events_.push({now + rank.t->seconds[i], ++sequence_, rank.index, i, 0});
        }
    }

    // ---- ending

    void end(Rank& rank, int32_t i, double now) {
        const Schedule& t = *rank.t;
        const int lane = t.lane[i];
        world_.ends[rank.offset + i] = now;
        rank.in_flight[lane]--;
        rank.idle_since[lane] = now;
        rank.finished[i] = 1;
        const int32_t* queue = t.queues.begin(lane);
        const auto length = static_cast<int32_t>(t.queues.end(lane) - queue);
        while (rank.published[lane] < length && rank.finished[queue[rank.published[lane]]]) {
            const int32_t head = queue[rank.published[lane]++];
            publish(rank, head, now);
        }
        start_lane(rank, lane, now, {rank.index, i, -1});
    }

    void publish(Rank& rank, int32_t i, double now) {
        const Schedule& t = *rank.t;
        rank.done++;
        const int32_t *first = t.gives.begin(i), *last = t.gives.end(i);
        for (const int32_t* pool = first; pool != last; pool++) rank.free[*pool]++;
        for (const int32_t* j = t.dependents.begin(i); j != t.dependents.end(i); j++)
            if (!--rank.missing[*j]) look(rank, *j, now, {rank.index, i, -1});
        for (const int32_t* pool = first; pool != last; pool++) {
            if (std::find(first, pool, *pool) != pool) continue;
            const uint16_t hungry = rank.starving[*pool];
            rank.starving[*pool] = 0;
            for (int lane = 0; lane < LANES; lane++)
                if (hungry & (1 << lane)) start_lane(rank, lane, now, {rank.index, i, *pool});
        }
        if (t.channel[i] >= 0) deliver(rank, i, now);
    }

    void look(Rank& rank, int32_t j, double now, Trigger trigger) {
        const int lane = rank.t->lane[j];
        const int32_t* at = rank.t->queues.begin(lane) + rank.next[lane];
        if (at != rank.t->queues.end(lane) && *at == j) start_lane(rank, lane, now, trigger);
    }

    void deliver(Rank& rank, int32_t i, double now) {
        const int32_t* to = rank.to + 2 * rank.t->channel[i];
        int32_t j = -1;
        if (to[0] >= 0) {
            const Schedule& there = *ranks_[to[0]].t;
            const auto before = [&there](int32_t recv, int32_t m) { return there.micro_batch[recv] < m; };
            const int32_t m = rank.t->micro_batch[i], *last = there.recvs.end(to[1]);
            const int32_t* found = std::lower_bound(there.recvs.begin(to[1]), last, m, before);
            if (found != last && there.micro_batch[*found] == m) j = *found;
        }
        if (j < 0) {
            lost_ = true;
            return;
        }
        Rank& receiver = ranks_[to[0]];
        if (!--receiver.missing[j]) look(receiver, j, now, {rank.index, i, -1});
    }

    // ---- lanes that share

    static void count(Rank& rank, int lane, int more) {
        rank.counts[lane] += more;
        rank.speeds = nullptr;
    }

    static const Speeds& speeds(Rank& rank) {
        if (!rank.speeds) rank.speeds = rank.pace->speeds(rank.counts);
        return *rank.speeds;
    }

    static void progress(Rank& rank, double now) {
        const double elapsed = now - rank.now;
        rank.now = now;
        if (elapsed > 0) {
            const Speeds& pace = speeds(rank);
            for (auto& [i, left] : rank.active) left -= elapsed * pace[rank.t->lane[i]];
        }
    }

    void plan_next(Rank& rank) {
        rank.version++;
        if (rank.active.empty()) return;
        const Speeds& pace = speeds(rank);
        double soonest = rank.active[0].second / pace[rank.t->lane[rank.active[0].first]];
        for (const auto& [i, left] : rank.active) soonest = std::min(soonest, left / pace[rank.t->lane[i]]);
        events_.push({rank.now + std::max(soonest, 0.0), ++sequence_, rank.index, -1, rank.version});
    }

    void advance(Rank& rank, double now) {
        progress(rank, now);
        double nearest = rank.active[0].second;
        for (const auto& [_, left] : rank.active) nearest = std::min(nearest, left);
        const double until = std::max(nearest, 0.0) + 1e-12;
        std::vector<int32_t> over;
        auto kept = rank.active.begin();
        for (const auto& one : rank.active) {
            if (one.second <= until) {
                over.push_back(one.first);
                count(rank, rank.t->lane[one.first], -1);
            } else {
                *kept++ = one;
            }
        }
        rank.active.erase(kept, rank.active.end());
        rank.advancing = true;
        for (const int32_t i : over) end(rank, i, now);
        rank.advancing = false;
        plan_next(rank);
    }

    const World& world_;
    std::vector<std::unique_ptr<Pace>> paces_;
    std::vector<Rank> ranks_;
    std::vector<std::vector<std::pair<int32_t, int32_t>>> waiting_;  // by collective, ranks that have arrived, and ops
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    int64_t sequence_ = 0;
    bool lost_ = false;  // a message that nobody receives
};

}  // namespace

EXPORT int64_t penstock_abi() { return 1; }

// Run one step of every rank. 1: all ops are done; 0: no rank can go on, or a message is lost; -1: there is no memory.
EXPORT int64_t penstock_simulate(const World* world) {
    try {
        return Run(*world).go();
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
