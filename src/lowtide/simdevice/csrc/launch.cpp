#include "launch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "allocators.h"
#include "device.h"

namespace lowtide {

namespace {

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  at::Tensor tensor(std::move(impl));
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// Resizable, so that `out=` kernels may grow it: follow_resize then moves the device tensor along.
c10::Storage unowned_cpu_storage(const c10::Storage& storage) {
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
          /*resizable=*/true};
}

}  // namespace

Range range_of(const at::Tensor& tensor) {
  auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * tensor.element_size()};
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return tensor_over(unowned_cpu_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

double distinct_bytes(const at::Tensor& tensor) {
  double elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) elements *= static_cast<double>(tensor.size(d));
  return elements * static_cast<double>(tensor.element_size());
}

Launch::Launch(const char* op, Touches touches)
    : op_(op), stream_(Streams::current()), touches_(touches), no_autocast_(c10::autocast_dispatch_keyset) {
  if (touches_ == Touches::nothing) return;
  Lock lock(device().mutex);
  tick_ = device().begin(stream_);
  device().streams.drain(stream_);
}

void Launch::check_access(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0 || touches_ == Touches::nothing) return;
  bytes_ += distinct_bytes(tensor);
  Lock lock(device().mutex);
  device().access({range_of(tensor), stream_, tick_, write, op_});
}

c10::Storage Launch::cpu_storage(const c10::Storage& sim) {
  for (const auto& shared : storages_)
    if (shared.sim.is_alias_of(sim)) return shared.cpu;
  storages_.push_back({sim, unowned_cpu_storage(sim)});
  return storages_.back().cpu;
}

c10::Storage Launch::sim_storage(const c10::Storage& cpu) {
  for (const auto& shared : storages_)
    if (shared.cpu.is_alias_of(cpu)) return shared.sim;
  c10::Storage sim(c10::Storage::use_byte_size_t(), cpu.nbytes(), adopt_storage(cpu), &device_allocator(),
                   /*resizable=*/true);
  storages_.push_back({sim, cpu});
  return sim;
}

at::Tensor Launch::cpu(const at::Tensor& argument, bool written) {
  if (!argument.defined()) return argument;
  if (argument.device().type() != kSim) {
    elsewhere_.push_back({argument, argument, written});
    return argument;
  }
  check_access(argument, written);
  at::Tensor alias = tensor_over(cpu_storage(argument.storage()), c10::DispatchKey::CPU, argument);
  arguments_.push_back({argument, alias, written});
  return alias;
}

void Launch::check_devices(bool any_rank) const {
  if (arguments_.empty()) return;
  for (const Argument& argument : elsewhere_)
    TORCH_CHECK(!argument.written && (any_rank || argument.cpu.dim() == 0),
                "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
                argument.cpu.device(), ", in a call of ", op_);
}

at::Tensor Launch::sim(const at::Tensor& result) {
  if (!result.defined()) return result;
  for (const Argument& argument : elsewhere_)
    if (argument.cpu.is_same(result) || argument.cpu.is_alias_of(result)) return result;
  for (const Argument& argument : arguments_) {
    if (!argument.cpu.is_same(result)) continue;
    if (argument.written) follow_resize(argument);
    return argument.sim;
  }
  size_t shared_before = storages_.size();
  at::Tensor tensor = tensor_over(sim_storage(result.storage()), c10::DispatchKey::PrivateUse1, result);
  if (storages_.size() > shared_before) check_access(tensor, /*write=*/true);
  return tensor;
}

void Launch::follow_resize(const Argument& argument) {
  const c10::Storage& cpu = argument.cpu.storage();
  auto* sim = argument.sim.storage().unsafeGetStorageImpl();
  auto still_shared = [&](const SharedStorage& s) { return s.cpu.is_alias_of(cpu) && s.sim.unsafeGetStorageImpl() == sim; };
  if (cpu.data() != sim->data() && std::any_of(storages_.begin(), storages_.end(), still_shared)) {
    // The kernel moved the bytes to memory of its own. The alias keeps pointing at what is now the device's.
    sim->set_data_ptr_noswap(adopt_storage(cpu));
    sim->set_nbytes(cpu.nbytes());
    check_access(argument.sim, /*write=*/true);
  }
  if (argument.sim.sizes() != argument.cpu.sizes() || argument.sim.strides() != argument.cpu.strides())
    argument.sim.unsafeGetTensorImpl()->set_sizes_and_strides(argument.cpu.sizes(), argument.cpu.strides());
}

void Launch::finish(double flops, bool host_waits) {
  for (const Argument& argument : arguments_)
    if (argument.written) follow_resize(argument);
  if (touches_ == Touches::nothing) return;
  Lock lock(device().mutex);
  device().charge_kernel(stream_, flops, bytes_);
  if (host_waits) device().host_wait(device().streams.mark(stream_));
}

}  // namespace lowtide
