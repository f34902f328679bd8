// Copies between device and host, with CUDA's rules for what is asynchronous.
//
// A copy is queued only if it is `non_blocking` and both sides have the same dtype and layout. To the host, the target
// must be pinned, too. From pageable memory, the bytes are staged first, so the host may go on and change them. Anything
// else needs a temporary, and then the host waits.
#include "copy.h"

#include <ATen/ops/_local_scalar_dense_native.h>

#include <cstring>
#include <memory>
#include <vector>

#include "allocators.h"
#include "device.h"
#include "launch.h"

namespace lowtide {

namespace {

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.is_conj() != b.is_conj() || a.is_neg() != b.is_neg() || !a.is_non_overlapping_and_dense()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

at::Tensor copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Launch launch("D2D copy");
  launch.cpu(to, /*written=*/true).copy_(launch.cpu(from));
  launch.finish(/*flops=*/0);
  return to;
}

struct HostCopy {
  at::Tensor from, to;
  Direction direction;
  StreamId stream;

  const char* name() const { return direction == Direction::h2d ? "H2D copy" : "D2H copy"; }
  const at::Tensor& host() const { return direction == Direction::h2d ? from : to; }
  const at::Tensor& on_sim() const { return direction == Direction::h2d ? to : from; }
  size_t bytes() const { return on_sim().numel() * on_sim().element_size(); }
};

// The queued work holds the backing memory, not the tensors: as on a real device, freeing them too early is a bug.
void queue_pinned(const HostCopy& copy, const Access& host_side) {
  Device& sim = device();
  auto keep_from = sim.memory.find(copy.from.const_data_ptr())->backing;
  auto keep_to = sim.memory.find(copy.to.const_data_ptr())->backing;
  Range from = range_of(copy.from), to = range_of(copy.to), host = host_side.range;
  sim.streams[copy.stream].push([=] {
    device().watch.open_during(host, [&] { std::memcpy(const_cast<char*>(to.begin), from.begin, to.bytes()); });
    (void)keep_from, (void)keep_to;
  });
  sim.watch.add(host_side);
}

void queue_staged(const HostCopy& copy) {
  Device& sim = device();
  Range from = range_of(copy.from), to = range_of(copy.to);
  auto staged = std::make_shared<std::vector<char>>(from.begin, from.end);
  auto keep_to = sim.memory.find(copy.to.const_data_ptr())->backing;
  sim.streams[copy.stream].push([staged, to, keep_to] {
    std::memcpy(const_cast<char*>(to.begin), staged->data(), staged->size());
  });
}

void run_now(const HostCopy& copy) {
  Device& sim = device();
  sim.streams.drain(copy.stream);
  auto run = [&] { cpu_alias(copy.to).copy_(cpu_alias(copy.from)); };
  const Block* block = sim.memory.find(copy.host().const_data_ptr());
  if (block) {
    sim.watch.open_during(range_of(copy.host()), run);
  } else {
    run();
  }
  sim.host_wait(sim.streams.mark(copy.stream));
}

void copy_host_device(const HostCopy& copy, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Device& sim = device();
  Lock lock(sim.mutex);
  uint64_t tick = sim.begin(copy.stream);
  const bool pinned = sim.memory.find(copy.host().const_data_ptr());
  const bool to_device = copy.direction == Direction::h2d;
  const bool asynchronous = non_blocking && (pinned || to_device) && same_layout(copy.from, copy.to);

  Access reading{range_of(copy.from), copy.stream, tick, /*write=*/false, copy.name()};
  Access writing{range_of(copy.to), copy.stream, tick, /*write=*/true, copy.name()};
  if (asynchronous) reading.queued = writing.queued = sim.streams[copy.stream].submitted() + 1;
  sim.access(reading);
  sim.access(writing);
  sim.charge_copy(copy.stream, copy.direction, copy.bytes(), pinned);
  if (asynchronous && pinned) {
    queue_pinned(copy, to_device ? reading : writing);
  } else if (asynchronous) {
    queue_staged(copy);
  } else {
    run_now(copy);
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor source = from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (to.numel() == 0) return to;
  if (on_device(from) && on_device(to)) return copy_on_device(source, to);
  Direction direction = on_device(to) ? Direction::h2d : Direction::d2h;
  copy_host_device({source, to, direction, Streams::current()}, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Device& sim = device();
  Lock lock(sim.mutex);
  StreamId stream = Streams::current();
  uint64_t tick = sim.begin(stream);
  sim.access({range_of(tensor), stream, tick, /*write=*/false, "item()"});
  sim.charge_copy(stream, Direction::d2h, tensor.element_size(), /*pinned=*/false);
  sim.host_wait(sim.streams.mark(stream));
  return at::native::_local_scalar_dense_cpu(cpu_alias(tensor));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr grown = device_allocator().allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept) {
    Device& sim = device();
    Lock lock(sim.mutex);
    StreamId stream = Streams::current();
    uint64_t tick = sim.begin(stream);
    sim.streams.drain(stream);
    auto* from = static_cast<const char*>(storage.data());
    auto* to = static_cast<char*>(grown.get());
    sim.access({{from, from + kept}, stream, tick, /*write=*/false, "resize"});
    sim.access({{to, to + kept}, stream, tick, /*write=*/true, "resize"});
    std::memcpy(to, from, kept);
    sim.charge_kernel(stream, /*flops=*/0, /*bytes=*/2.0 * static_cast<double>(kept));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace lowtide
