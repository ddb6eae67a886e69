// The shapes of what an op gives, from its meta kernel; kept, because many of those are Python's, and slow.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include "values.h"

namespace sim {

struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};
struct Shapes {
  std::vector<std::vector<Shape>> results;                // of each new one, its tensors
  std::vector<std::pair<size_t, std::vector<int64_t>>> outs;  // sizes of arguments that are written
};

// What the shapes depend on, as bytes. False: something else.
struct Key {
  std::string bytes;
  void add(int64_t n) { bytes.append(reinterpret_cast<const char*>(&n), sizeof n); }
  void add(const Tensor& t) {
    if (!t.defined()) return add(-1);
    add(static_cast<int64_t>(t.scalar_type()));
    add(t.unsafeGetTensorImpl()->is_wrapped_number() + 2 * is_ours(t));
    add(t.dim());
    for (int64_t d = 0; d < t.dim(); d++) add(t.size(d)), add(t.stride(d));
  }
  bool add(const IValue& value) {
    bytes.push_back(static_cast<char>('a' + value.isTensor() + 2 * value.isInt() + 4 * value.isDouble() + 8 * value.isBool()));
    if (value.isNone()) return bytes.push_back('n'), true;
    if (value.isTensor()) return add(value.toTensor()), true;
    if (value.isInt()) return add(value.toInt()), true;
    if (value.isBool()) return add(int64_t{value.toBool()}), true;
    if (value.isDouble()) return bytes.append(std::to_string(value.toDouble())), true;
    if (value.isDevice() || value.isGenerator()) return true;
    if (value.isIntList()) {
      auto list = value.toIntVector();
      add(static_cast<int64_t>(list.size()));
      for (int64_t n : list) add(n);
      return true;
    }
    if (value.isBoolList()) {
      for (bool b : value.toBoolList().vec()) add(int64_t{b});
      return true;
    }
    if (value.isString()) return bytes.append(value.toStringRef()), true;
    if (value.isTensorList() || value.isOptionalTensorList()) {
      auto list = value.toListRef();
      add(static_cast<int64_t>(list.size()));
      for (const IValue& each : list) add(each.isNone() ? Tensor() : each.toTensor());
      return true;
    }
    return false;
  }
};

inline Shapes ask_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& schema = op.schema();
  auto to_meta = [](const Tensor& t) {  // numbers stay numbers: they do not decide about the results' type
    if (!is_ours(t) && !t.dim()) return t;
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  };
  Stack stack;
  for (const IValue& value : arguments)
    stack.push_back(value.isDevice() ? IValue(c10::Device(at::kMeta)) : value.isGenerator() ? IValue() : mapped(value, to_meta));
  Stack given = stack;
  op.callBoxed(stack);
  Shapes found;
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto& tensors = found.results.emplace_back();
    if (!schema.returns()[r].alias_info())
      for (const Tensor& t : tensors_of(stack[r]))
        tensors.push_back(t.defined() ? Shape{true, t.sizes().vec(), t.strides().vec(), t.scalar_type()} : Shape{});
  }
  for (size_t i = 0; i < given.size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && given[i].isTensor() && given[i].toTensor().defined())
      found.outs.emplace_back(i, given[i].toTensor().sizes().vec());
  }
  return found;
}
inline Shapes shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  static auto& lock = immortal<std::mutex>();
  static auto& kept = immortal<std::unordered_map<std::string, Shapes>>();
  Key key;
  key.add(reinterpret_cast<int64_t>(&op.schema()));
  key.add(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  for (const IValue& value : arguments)
    if (!key.add(value)) return ask_meta(op, arguments);
  {
    std::lock_guard<std::mutex> guard(lock);
    auto entry = kept.find(key.bytes);
    if (entry != kept.end()) return entry->second;
  }
  Shapes found = ask_meta(op, arguments);  // not with the lock held: it may be Python's
  std::lock_guard<std::mutex> guard(lock);
  return kept.emplace(key.bytes, std::move(found)).first->second;
}

}  // namespace sim
