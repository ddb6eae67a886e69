// The device's own random numbers. Its generator gives every op a seed when the op is called; numbers are drawn from it
// when the op runs. Nothing of this is the CPU's generator.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/ivalue.h>

#include "memory.h"

namespace sim {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(seed) {}
  at::CPUGeneratorImpl inner;
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the simulated device's generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state(); }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->inner.set_state(*inner.get_state());
    return copy;
  }
};
inline at::Generator& default_generator() {
  static auto* one = new at::Generator(at::make_generator<Generator>());
  return *one;
}
inline uint64_t draw(const c10::IValue& given) {  // a seed for one op
  at::Generator generator = given.isNone() ? default_generator() : given.toGenerator();
  TORCH_CHECK(generator.device().type() == kDevice, "expected a generator of the device, got one of ", generator.device());
  std::lock_guard<std::mutex> guard(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner.random64();
}

}  // namespace sim
