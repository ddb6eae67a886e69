// Arguments and results of ops, and the tensors in them.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "tensors.h"

namespace sim {
using c10::IValue;
using torch::jit::Stack;

inline std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorList().vec();
  std::vector<Tensor> found;
  if (value.isList())
    for (const IValue& each : value.toListRef())
      if (each.isTensor()) found.push_back(each.toTensor());
  return found;
}
// The value with each tensor in it replaced; what is undefined stays so.
template <typename F>
IValue mapped(const IValue& value, const F& f) {
  auto one = [&](const Tensor& t) { return t.defined() ? f(t) : t; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList().vec()) list.push_back(one(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList().vec())
      list.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return list;
  }
  return value;
}

}  // namespace sim
