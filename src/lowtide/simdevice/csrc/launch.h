// One kernel launch: a CPU kernel that works directly on device memory.
//
// Device memory is host memory here, so a kernel gets CPU tensors that alias the device tensors' bytes, and a result
// that the kernel allocated becomes a device block as it is: nothing is copied either way. Around it, the launch does
// what a launch on a real device means: the stream's queued work comes first, every access is race-checked, and the
// clock is charged.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <vector>

#include "race.h"

namespace lowtide {

// The bytes between the first and the last element of a tensor.
Range range_of(const at::Tensor& tensor);

// The bytes of a tensor's distinct elements: an expanded dimension holds one.
double distinct_bytes(const at::Tensor& tensor);

// A CPU tensor over the same bytes. It owns nothing.
at::Tensor cpu_alias(const at::Tensor& tensor);

class Launch {
 public:
  // What the operator does with its tensors' bytes. A view operator only looks at sizes: it is no kernel.
  enum class Touches { memory, nothing };

  explicit Launch(const char* op, Touches touches = Touches::memory);

  // The CPU alias of an argument. Tensors that are not on the device pass through.
  at::Tensor cpu(const at::Tensor& argument, bool written = false);

  // Refuses arguments on another device, as an accelerator does; the CPU kernel would not notice them. Scalars may be
  // on the CPU if they are only read. With `any_rank`, so may other tensors.
  void check_devices(bool any_rank = false) const;

  // The clock is charged for every byte of the arguments, unless the kernel picks a few of this one's.
  void charge_less(double bytes) { bytes_ -= bytes; }

  // The device tensor for what the kernel returned: the argument itself, a view of an argument, or a new block.
  at::Tensor sim(const at::Tensor& result);

  // Follows arguments that the kernel resized, and charges the clock. With `host_waits` the host needs the result.
  void finish(double flops, bool host_waits = false);

 private:
  struct Argument {
    at::Tensor sim, cpu;
    bool written;
  };
  struct SharedStorage {
    c10::Storage sim, cpu;
  };

  c10::Storage cpu_storage(const c10::Storage& sim);
  c10::Storage sim_storage(const c10::Storage& cpu);
  void follow_resize(const Argument& argument);
  void check_access(const at::Tensor& tensor, bool write);

  const char* op_;
  StreamId stream_;
  uint64_t tick_ = 0;
  double bytes_ = 0;
  Touches touches_;
  std::vector<Argument> arguments_;
  std::vector<Argument> elsewhere_;  // arguments on another device
  std::vector<SharedStorage> storages_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

}  // namespace lowtide
