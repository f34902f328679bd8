// Operators that make, resize or re-view device tensors without computing anything.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "allocators.h"
#include "copy.h"
#include "device.h"

namespace lowtide {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
template <typename T>
using Maybe = std::optional<T>;

void check_options(Maybe<at::Layout> layout, Maybe<at::Device> where, Maybe<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "sim: only strided tensors, not ", *layout);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "sim: only CPU tensors can be pinned");
  TORCH_CHECK(!where || where->index() <= 0, "sim: there is one device per process, so ", *where,
              " does not exist; use sim or sim:0");
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<at::Device> where,
             Maybe<bool> pin_memory, Maybe<at::MemoryFormat> format) {
  check_options(layout, where, pin_memory);
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout,
                     Maybe<at::Device> where, Maybe<bool> pin_memory) {
  check_options(layout, where, pin_memory);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Autograd's zero gradients: a tensor without memory that every operator knows to be zero.
Tensor efficient_zero_tensor(IntArrayRef sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout,
                             Maybe<at::Device> where, Maybe<bool> pin_memory) {
  check_options(layout, where, pin_memory);
  at::native::ZeroTensorAllocator allocator(kSimDevice);
  return at::detail::empty_generic(sizes, &allocator, kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// The rest is arithmetic on sizes and strides: torch's own functions do it for any device.
Tensor as_strided(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides, Maybe<SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, std::move(offset));
}

Tensor view(const Tensor& self, SymIntArrayRef sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

// torch's own resize would move the bytes behind the device's back.
const Tensor& resize_(const Tensor& self, SymIntArrayRef symbolic_sizes, Maybe<at::MemoryFormat> format) {
  IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  if (self.sizes() != sizes) self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_view(Tensor& self, at::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

// Leaves an empty tensor; other views of the storage keep it.
Tensor& set_nothing(Tensor& self) {
  at::Storage nothing(at::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(),
                      /*resizable=*/true);
  return at::cpu::set_(self, std::move(nothing), 0, {0}, {1});
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zero_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// copy_from resolves conjugate and negative views itself: torch's fallback would resolve them with a copy, forever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace lowtide
