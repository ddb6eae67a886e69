// Every other op: results are shaped by the meta kernel when it is called, and filled by the CPU's kernel when it runs.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>

#include "random.h"
#include "shapes.h"

namespace sim {

// ---- what is known of an op
struct Known {
  std::string name;
  bool waits;     // its results depend on values: the host waits for them, as on a GPU
  bool in_place;  // its results are its arguments as they are
  bool mixes;     // it takes a tensor of the CPU beside the device's, as indices
  int generator;  // which argument; -1: none
};
inline const Known& known(const c10::OperatorHandle& op) {
  static auto& lock = immortal<std::mutex>();
  static auto& all = immortal<std::unordered_map<std::string, Known>>();
  const auto& schema = op.schema();
  std::string name = c10::toString(schema.operator_name());
  std::lock_guard<std::mutex> guard(lock);
  auto entry = all.find(name);
  if (entry != all.end()) return entry->second;
  Known it{name, false, false, name.find("index") != std::string::npos, -1};
  it.waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  it.in_place = true;
  for (const auto& result : schema.returns()) {
    bool tensors = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                   result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    it.waits = it.waits || !tensors;
    it.in_place = it.in_place && result.alias_info() && result.alias_info()->isWrite();
  }
  it.in_place = it.in_place && schema.operator_name().name.back() == '_';
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (schema.arguments()[i].name() == "generator") it.generator = static_cast<int>(i);
  return all.emplace(name, std::move(it)).first->second;
}

inline bool by_mask(const Stack& arguments) {  // how many elements it is about depends on values
  for (const IValue& value : arguments)
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& t : value.toOptionalTensorList().vec())
        if (t.has_value() && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
  return false;
}

// ---- where the CPU's kernels differ from a GPU's
inline void before(const std::string& name, Stack& stack) {
  if (name == "aten::native_layer_norm_backward" && stack[5].isTensor() && stack[5].toTensor().defined())
    for (int i : {3, 4})  // the CPU keeps mean and deviation in the weights' type
      stack[i] = stack[i].toTensor().to(stack[5].toTensor().scalar_type());
  if ((name == "aten::histc" || name == "aten::histc.out") && !stack[0].toTensor().is_floating_point())
    stack[0] = stack[0].toTensor().to(at::kDouble);  // the CPU counts floating-point numbers alone
}

struct Argument {  // as the task needs it
  IValue value;
  std::vector<std::optional<Place>> tensors;
  std::vector<Tensor> kept;  // of the CPU
  IValue on_cpu() const {
    size_t next = 0;
    return mapped(value, [&](const Tensor&) { return tensors[next++]->on_cpu(); });
  }
};

inline IValue generator_of(uint64_t seed) { return IValue(at::detail::createCPUGenerator(seed)); }

inline void kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Known& it = known(op);
  const size_t n = schema.arguments().size();
  Stack arguments(stack->end() - n, stack->end());
  for (const IValue& value : arguments)
    for (const Tensor& t : tensors_of(value))
      TORCH_CHECK(!t.defined() || is_ours(t) || !t.dim() || it.mixes, it.name,
                  ": expected all tensors to be on the same device, but one is on ", t.device());
  if (it.waits || (it.mixes && by_mask(arguments))) {
    count("host waits: " + it.name);
    at::native::cpu_fallback(op, stack);
    return;
  }
  Shapes shapes = it.in_place ? Shapes{} : shapes_of(op, arguments);
  for (const auto& [i, sizes] : shapes.outs)
    if (arguments[i].toTensor().sizes() != c10::IntArrayRef(sizes)) arguments[i].toTensor().resize_(sizes);
  // The results.
  std::vector<IValue> results;
  std::vector<std::optional<Place>> fresh;
  std::vector<Touch> touches;
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto* alias = schema.returns()[r].alias_info();
    if (!alias) {
      c10::List<Tensor> made;
      for (const Shape& shape : shapes.results[r]) {
        if (!shape.defined) {
          made.push_back(Tensor());
          fresh.emplace_back(std::nullopt);
          continue;
        }
        made.push_back(at::empty_strided(shape.sizes, shape.strides, at::TensorOptions(shape.dtype).device(the_device())));
        fresh.emplace_back(Place(made[made.size() - 1]));
        touches.push_back(touch_of(made[made.size() - 1], true));
      }
      if (schema.returns()[r].type()->kind() == c10::TypeKind::ListType) results.push_back(made);
      else results.push_back(Tensor(made[0]));
      continue;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), it.name, ": a view that the simulated device does not know");
    for (size_t i = 0; i < n; i++) {
      auto* own = schema.arguments()[i].alias_info();
      if (!own || own->beforeSets() != alias->beforeSets()) continue;
      results.push_back(arguments[i]);
      fresh.emplace_back(std::nullopt);
      break;
    }
  }
  TORCH_CHECK(results.size() == schema.returns().size(), it.name, ": results that the simulated device does not know");
  // The arguments: addresses alone, so that nothing lives longer than the caller lets it.
  std::vector<Argument> captured;
  for (size_t i = 0; i < n; i++) {
    auto* alias = schema.arguments()[i].alias_info();
    Argument argument;
    argument.value = arguments[i].isDevice() ? IValue(c10::Device(at::kCPU)) : mapped(arguments[i], [&](const Tensor& t) {
      Tensor own = is_ours(t) ? t : t.detach().clone();  // a number, or indices: what counts is their value now
      if (is_ours(t)) touches.push_back(touch_of(t, alias && alias->isWrite()));
      else argument.kept.push_back(own);
      argument.tensors.emplace_back(Place(own));
      return at::empty({0});  // stands for it
    });
    captured.push_back(std::move(argument));
  }
  uint64_t seed = it.generator < 0 ? 0 : draw(arguments[it.generator]);
  count("kernels");
  enqueue(t_stream, it.name, touches, [op, &it, captured = std::move(captured), fresh = std::move(fresh), seed] {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset);
    Stack local;
    for (const Argument& argument : captured) local.push_back(argument.on_cpu());
    if (it.generator >= 0) local[it.generator] = generator_of(seed);
    before(it.name, local);
    op.callBoxed(local);
    size_t next = 0;
    for (const IValue& value : local)
      for (const Tensor& made : tensors_of(value)) {
        // Nothing: what a GPU keeps for a backward, and the CPU does not (a normalisation in evaluation).
        if (next < fresh.size() && fresh[next] && made.numel()) fresh[next]->on_cpu().copy_(made);
        next++;
      }
  });
  torch::jit::drop(*stack, n);
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace sim
