// Tensors of the device: how they are made, seen in another shape, and copied.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "memory.h"

namespace sim {
using at::Tensor;

inline bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

inline size_t extent(const Tensor& tensor) {  // bytes from its first element to the end of its last
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.itemsize();
}
struct Place {  // of a tensor, without what keeps its memory alive
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  explicit Place(const Tensor& tensor)
      : data(tensor.numel() ? tensor.data_ptr() : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}
  Tensor on_cpu() const {  // for kernels
    return at::from_blob(real(data), sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
  }
};
inline Touch touch_of(const Tensor& tensor, bool writes) {
  size_t nbytes = extent(tensor);
  return {nbytes ? tensor.data_ptr() : nullptr, nbytes, writes};
}

inline const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host can be page-locked");
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}
inline Tensor& set_whole_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
inline Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

inline void grow(const c10::Storage& storage, size_t nbytes) {
  auto* it = storage.unsafeGetStorageImpl();
  auto next = allocator().allocate(nbytes);
  if (size_t kept = std::min(nbytes, it->nbytes())) allocator().copy_data(next.get(), it->data(), kept);
  it->set_data_ptr(std::move(next));
  it->set_nbytes(nbytes);
}
inline const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t need = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (need > self.storage().nbytes()) grow(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
inline void record_stream(Tensor& self, at::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}
// A parameter may be moved from the CPU to the device, as it may with CUDA.
inline bool may_become(const Tensor&, const Tensor&) { return true; }

// ---- copies
inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  Tensor wide = source.expand_as(target);
  bool crosses = !is_ours(source) || !is_ours(target);
  const Tensor& host = is_ours(source) ? target : source;
  bool locked = !crosses || is_locked(host.data_ptr(), extent(host));
  bool up = crosses && is_ours(target);
  Tensor kept;
  if (up && !locked) kept = wide = wide.clone();  // as with CUDA: it is read by the time that the call returns
  std::vector<Touch> touches;
  if (is_ours(target) || locked) touches.push_back(touch_of(target, true));
  if (is_ours(source) || (locked && !kept.defined())) touches.push_back(touch_of(wide, false));
  const char* what = !crosses ? "copy" : up ? "copy to the device" : "copy from the device";
  if (crosses && non_blocking && !locked && here().label)
    find(std::string(what) + " in " + label() + ", of memory that is not page-locked: it waits");
  if (crosses) count(locked ? "copies of page-locked memory" : "copies of other memory");
  enqueue(t_stream, what, touches, [from = Place(wide), to = Place(target), kept] {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset);
    to.on_cpu().copy_(from.on_cpu());
  });
  if (crosses && (!non_blocking || (!locked && !up))) synchronize_stream(t_stream);
  return target;
}
inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}
inline at::Scalar local_scalar_dense(const Tensor& self) {
  count("host waits: for a number");
  Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_from(self, host, false);
  return host.item();
}

}  // namespace sim
