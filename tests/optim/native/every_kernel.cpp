// Calls every kernel in every form of state on the same pseudo-random numbers, and prints a checksum of what each has
// made: a line per case, to compare with those of another processor. The first argument is the instruction set's level.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

using namespace penstock;

extern "C" {
int penstock_best_level();
void penstock_use_level(int wanted);
void penstock_step(const StepArgs* args, size_t n, int threads);
void penstock_norms(int type, const void* x, double* partials, size_t n, int threads);
void penstock_add(int type, float* acc, const void* x, size_t n, int threads);
void penstock_cast(int to, void* dst, int from, const void* src, size_t n, int threads);
void penstock_split(void* weights, void* rest, const float* master, size_t n, int threads);
void penstock_join(float* master, const void* weights, const void* rest, size_t n, int threads);
void penstock_encode(int second, void* codes, uint16_t* scales, const float* x, size_t n, int threads);
void penstock_decode(int second, float* x, const void* codes, const uint16_t* scales, size_t n, int threads);
}

namespace {

constexpr int kThreads = 2;

uint64_t state;

uint64_t draw() {  // xorshift64*
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull;
}

// Of 2^-149 to 2^24, of either sign; now and then a zero, an infinity or a NaN.
std::vector<float> floats(size_t n, bool positive = false) {
  std::vector<float> made(n);
  for (float& x : made) {
    const uint64_t r = draw();
    uint32_t bits = static_cast<uint32_t>(r % 152) << 23 | (static_cast<uint32_t>(r >> 32) & 0x7fffffu);
    if (r >> 8 & 1 && !positive) bits |= 0x80000000u;
    const uint32_t special[] = {0u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u};
    if ((r >> 16) % 1021 == 0) bits = special[positive ? 2 * (r % 3) : r % 5];
    memcpy(&x, &bits, 4);
  }
  return made;
}

template <class T>
std::vector<T> integers(size_t n) {
  std::vector<T> made(n);
  for (T& x : made) x = static_cast<T>(draw());
  return made;
}

struct Sum {  // FNV-1a
  uint64_t value = 0xcbf29ce484222325ull;

  void byte(uint8_t b) { value = (value ^ b) * 0x100000001b3ull; }

  void add(const float* x, size_t n) {  // the payload and sign of a NaN are left open
    for (size_t i = 0; i < n; ++i) {
      uint32_t bits;
      memcpy(&bits, x + i, 4);
      if (x[i] != x[i]) bits = 0x7fc00000u;
      for (int at = 0; at < 32; at += 8) byte(static_cast<uint8_t>(bits >> at));
    }
  }

  void add(const double* x, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      uint64_t bits;
      memcpy(&bits, x + i, 8);
      if (x[i] != x[i]) bits = 0;
      for (int at = 0; at < 64; at += 8) byte(static_cast<uint8_t>(bits >> at));
    }
  }

  template <class T>
  void add(const T* x, size_t n) {
    for (size_t i = 0; i < n * sizeof(T); ++i) byte(reinterpret_cast<const uint8_t*>(x)[i]);
  }

  template <class T>
  void add(const std::vector<T>& x) { add(x.data(), x.size()); }
};

void print(const std::string& name, const Sum& sum) {
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(sum.value));
}

// A moment in one of its types; only the vectors of that type are used.
struct Numbers {
  std::vector<float> whole;
  std::vector<uint16_t> half, scales;
  std::vector<uint8_t> codes;

  Numbers(Moment type, bool positive, size_t n) : whole(floats(n, positive)), half(n), scales(n / kGroup), codes(n) {
    if (type == kMoment16) penstock_cast(kBFloat16, half.data(), kFloat32, whole.data(), n, kThreads);
    if (type == kCodes) penstock_encode(positive, codes.data(), scales.data(), whole.data(), n, kThreads);
  }

  MomentArgs args(Moment type) {
    if (type == kMoment32) return {whole.data(), nullptr};
    if (type == kMoment16) return {half.data(), nullptr};
    return {codes.data(), scales.data()};
  }

  void add_to(Sum& sum) const { sum.add(whole), sum.add(half), sum.add(scales), sum.add(codes); }
};

void step(Kind kind, Form form, Moment first_type, Moment second_type, DType grad_type, size_t n) {
  const bool has_first = kind != kSGD && kind != kOrthogonal, has_second = kind == kAdamW || kind == kAdam;
  std::vector<float> grad = floats(n), whole = floats(n);
  std::vector<uint16_t> grad16(n), half(n), lower(n);
  penstock_cast(kBFloat16, grad16.data(), kFloat32, grad.data(), n, kThreads);
  if (form == kSplit) penstock_split(half.data(), lower.data(), whole.data(), n, kThreads);
  Numbers first(first_type, false, n), second(second_type, true, n);
  std::vector<double> partials(n / kBlock);
  StepArgs args = {};
  args.grad = grad_type == kBFloat16 ? static_cast<void*>(grad16.data()) : grad.data();
  args.weights = form == kWhole ? static_cast<void*>(whole.data()) : half.data();
  args.rest = form == kSplit ? static_cast<void*>(lower.data()) : form == kWhole ? nullptr : whole.data();
  if (has_first) args.first = first.args(first_type);
  if (has_second) args.second = second.args(second_type);
  args.partials = n % kBlock == 0 ? partials.data() : nullptr;
  args.scalars = {0.37f, 0.9995f, 0.013f, 0.9f, 0.1f, 0.999f, 0.001f, 0.0031f, 7.1f, 1e-8f};
  args.kind = kind, args.grad_type = grad_type, args.form = form;
  args.first_type = first_type, args.second_type = second_type;
  Sum sum;
  for (int times = 0; times < 3; ++times) {
    penstock_step(&args, n, kThreads);
    sum.add(whole), sum.add(half), sum.add(lower), sum.add(partials);
    first.add_to(sum), second.add_to(sum);
  }
  char name[96];
  std::snprintf(name, sizeof name, "step kind=%d form=%d moments=%d,%d grad=%d n=%zu", kind, form, first_type,
                second_type, grad_type, n);
  print(name, sum);
}

void all_steps(size_t n) {
  for (int kind = kAdamW; kind <= kOrthogonal; ++kind) {
    const bool makes = kind == kMuon || kind == kNesterovMuon;
    for (int form = makes ? kMade16 : kWhole; form <= (makes ? kMade16 : kBesideFloat16); ++form)
      for (int first = kMoment32; first <= kCodes; ++first)
        for (int second = kMoment32; second <= kCodes; ++second)
          for (const DType grad : {kFloat32, kBFloat16, kRounded})
            step(static_cast<Kind>(kind), static_cast<Form>(form), static_cast<Moment>(first),
                 static_cast<Moment>(second), grad, n);
  }
}

void others(size_t n) {
  const std::string size = " n=" + std::to_string(n);
  const std::vector<float> x = floats(n);
  std::vector<uint16_t> halves = integers<uint16_t>(n), upper(n), lower = integers<uint16_t>(n), scales(n / kGroup);
  for (int type : {kFloat32, kBFloat16, kRounded}) {
    Sum sum;
    std::vector<double> partials(n / kBlock);
    const void* from = type == kBFloat16 ? static_cast<const void*>(halves.data()) : x.data();
    penstock_norms(type, from, partials.data(), partials.size() * kBlock, kThreads);
    sum.add(partials);
    print("norms type=" + std::to_string(type) + size, sum);
  }
  for (int type : {kFloat32, kBFloat16}) {
    Sum sum;
    std::vector<float> acc = floats(n);
    penstock_add(type, acc.data(), type == kBFloat16 ? static_cast<const void*>(halves.data()) : x.data(), n, kThreads);
    sum.add(acc);
    print("add type=" + std::to_string(type) + size, sum);
  }
  for (int to : {kFloat32, kBFloat16, kFloat16})
    for (int from : {kFloat32, kBFloat16, kFloat16}) {
      Sum sum;
      std::vector<float> whole(n);
      std::vector<uint16_t> half(n);
      void* target = to == kFloat32 ? static_cast<void*>(whole.data()) : half.data();
      penstock_cast(to, target, from, from == kFloat32 ? static_cast<const void*>(x.data()) : halves.data(), n,
                    kThreads);
      sum.add(whole), sum.add(half);
      print("cast to=" + std::to_string(to) + " from=" + std::to_string(from) + size, sum);
    }
  Sum joined;
  std::vector<float> whole(n);
  penstock_join(whole.data(), halves.data(), lower.data(), n, kThreads);
  joined.add(whole);
  print("join" + size, joined);
  Sum split;
  penstock_split(upper.data(), lower.data(), x.data(), n, kThreads);
  split.add(upper), split.add(lower);
  print("split" + size, split);
  for (int second : {0, 1}) {
    Sum sum;
    std::vector<uint8_t> codes(n);
    penstock_encode(second, codes.data(), scales.data(), floats(n, second != 0).data(), n, kThreads);
    sum.add(codes), sum.add(scales);
    const std::vector<uint8_t> any = integers<uint8_t>(n);
    const std::vector<uint16_t> of = integers<uint16_t>(n / kGroup);
    penstock_decode(second, whole.data(), any.data(), of.data(), n, kThreads);
    sum.add(whole);
    print("codes second=" + std::to_string(second) + size, sum);
  }
}

}  // namespace

int main(int count, char** words) {
  const int level = count > 1 ? std::atoi(words[1]) : 0;
  if (level > penstock_best_level()) return 3;  // this processor has no such instruction set
  penstock_use_level(level);
  state = 1;
  for (const size_t n : {2 * kBlock, kBlock + 9 * kGroup}) {
    all_steps(n);
    others(n);
  }
  return 0;
}
