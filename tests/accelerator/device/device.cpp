// A device of PyTorch's that is simulated on the CPU, and hostile: see tests/accelerator/__init__.py.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "kernels.h"

namespace sim {

c10::Stream stream_of(int s) { return c10::Stream(c10::Stream::UNSAFE, the_device(), s); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Event& event_of(void* event) { return *static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

  c10::Stream getStream(c10::Device) const override { return stream_of(t_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(t_stream);
    t_stream = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(g_lock);
    const Stream& it = g_streams[stream.id()];
    if (it.done < it.queued) return false;
    join(here().clock, it.clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(static_cast<int>(stream.id())); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    sim::record(event_of(*event), static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_event(event_of(event), static_cast<int>(stream.id()));
  }
  bool queryEvent(void* event) const override { return !event || is_over(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(event_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(is_over(event_of(first)) && is_over(event_of(second)), "an event is not over yet");
    return *event_of(second).ms - *event_of(first).ms;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  mutable PinnedAllocator pinned;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_locked(address, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { grow(storage, nbytes); }
};

// As on a GPU, where one op makes the mask and the product.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (train.has_value() && !*train) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return 0;  // by its formula: sdp::SDPBackend::math
}
// Torch asks devices that it does not know for convolutions of their own.
const c10::OperatorHandle& handle(const char* name) {
  static auto& all = immortal<std::map<std::string, c10::OperatorHandle>>();
  auto entry = all.find(name);
  if (entry == all.end()) entry = all.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return entry->second;
}
void convolution(const c10::OperatorHandle&, Stack* stack) { kernel(handle("aten::convolution"), stack); }
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  auto first = stack->end() - static_cast<long>(op.schema().arguments().size());
  std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, IValue(bias_sizes));
  kernel(handle("aten::convolution_backward"), stack);
}
at::Generator generator() { return default_generator(); }

TORCH_LIBRARY(penstock_sim, m) { m.def("generator() -> Generator?", generator); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", may_become);
  m.impl("_fused_sdp_choice", plain_attention);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

const std::string& answer(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last;
}

}  // namespace sim

// ---- for Python, by ctypes
#define SIM_API extern "C" __attribute__((visibility("default")))
SIM_API void sim_start() {
  sim::map_memory();
  c10::SetAllocator(sim::kDevice, &sim::allocator(), 1);
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  c10::impl::registerDeviceGuard(sim::kDevice, new sim::Guard);
  at::globalContext().lazyInitDevice(sim::kDevice);  // else torch takes no memory for page-locked
  sim::start_device();
}
SIM_API void sim_limit(uint64_t nbytes) {
  std::lock_guard<std::mutex> guard(sim::allocator().lock);
  sim::allocator().limit = nbytes;
}
SIM_API void sim_patience(double us, uint64_t seed) {
  std::lock_guard<std::mutex> guard(sim::g_lock);
  sim::g_patience_us = us;
  sim::g_random.seed(seed);
}
SIM_API int sim_lock_pages(const void* address, uint64_t nbytes) { return sim::lock_pages(address, nbytes); }
SIM_API int sim_unlock_pages(const void* address) {
  // CUDA waits for nobody there, by its documents, and the memory is somebody else's afterwards.
  if (size_t nbytes = sim::locked_at(address)) sim::host_access(address, nbytes, true, "unlock");
  return sim::unlock_pages(address);
}
SIM_API void sim_host_access(const void* address, uint64_t nbytes, int writes, const char* what) {
  if (sim::is_locked(address, 1)) sim::host_access(address, nbytes, writes, what);
}
SIM_API void sim_tell(uint64_t key) { sim::tell(key); }
SIM_API void sim_hear(uint64_t key) { sim::hear(key); }
SIM_API uint64_t sim_close_gate() { return sim::close_gate(sim::t_stream); }
SIM_API void sim_open_gate(uint64_t gate) { sim::open_gate(gate); }
SIM_API void sim_meet_autograd() { sim::meet_autograd(); }
SIM_API void sim_ask_where(void (*ask)()) { sim::g_ask_where = ask; }
SIM_API void sim_say_where(const char* where) { sim::say_where(where); }
SIM_API void sim_label(const char* label) {
  std::lock_guard<std::mutex> guard(sim::g_lock);
  sim::here().label = sim::g_names.id(label);
}
SIM_API const char* sim_findings() {
  std::lock_guard<std::mutex> guard(sim::g_findings_lock);
  std::string text;
  for (const auto& each : sim::g_findings) text += each->what + each->where + "\n";
  return sim::answer(text).c_str();
}
SIM_API const char* sim_counts() {
  std::lock_guard<std::mutex> guard(sim::g_findings_lock);
  std::string text;
  for (const auto& [what, n] : sim::g_counts) text += std::to_string(n) + " " + what + "\n";
  return sim::answer(text).c_str();
}
// Wait for everything, and forget what was seen so far. Gives what kernels have failed with and nobody has heard of.
SIM_API const char* sim_clear() {
  sim::drain_all();
  std::string text;
  std::lock_guard<std::mutex> guard(sim::g_lock);
  for (const auto& each : sim::g_errors) text += each + "\n";
  sim::g_errors.clear();
  sim::g_ranges.clear();
  sim::g_told.clear();
  std::lock_guard<std::mutex> findings(sim::g_findings_lock);
  sim::g_findings.clear();
  sim::g_counts.clear();
  return sim::answer(text).c_str();
}
