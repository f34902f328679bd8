#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <utility>

#include "violation_error.h"

namespace lowtide {

namespace {

// A fork must not catch another thread inside the device: its lock would stay shut in the child. The child gets a new
// one, because a recursive mutex knows the thread that it belongs to.
Device* make_device() {
  auto* instance = new Device();
  pthread_atfork([] { device().mutex.lock(); }, [] { device().mutex.unlock(); },
                 [] { new (&device().mutex) std::recursive_mutex(); });
  return instance;
}

}  // namespace

Device& device() {
  static auto* instance = make_device();
  return *instance;
}

void Device::configure(const Settings& wanted) {
  settings = wanted;
  if (!settings.raise) raise_later_.reset();
}

uint64_t Device::begin(StreamId stream) {
  raise_pending();
  return streams.begin(stream);
}

void Device::access(const Access& access) {
  Block* block = memory.find(access.range.begin);
  if (!block) return;
  auto conflict = block->history.record(access, streams[access.stream].clock, streams.host_clock());
  if (!conflict) return;
  if (conflict->previous_life) memory.settle(*conflict);
  report(race(access, *conflict));
}

void Device::charge_kernel(StreamId stream, double flops, double bytes) {
  ++counters.kernels;
  counters.flops += flops;
  book(clock.compute, "kernel", stream, std::max(flops / settings.flops, bytes / settings.bandwidth), false);
}

void Device::charge_copy(StreamId stream, Direction direction, size_t bytes, bool pinned) {
  ++counters.copies;
  bool h2d = direction == Direction::h2d;
  (h2d ? counters.h2d_bytes : counters.d2h_bytes) += bytes;
  double duration = static_cast<double>(bytes) / (h2d ? settings.h2d : settings.d2h);
  book(h2d ? clock.h2d : clock.d2h, h2d ? "h2d" : "d2h", stream, duration, pinned);
}

void Device::book(Engine& engine, const char* kind, StreamId stream, double duration, bool pinned) {
  clock.host_spends(settings.launch);
  Stream& on = streams[stream];
  on.ready = engine.reserve(std::max(on.ready, clock.host), duration);
  if (timeline) timeline->push_back({kind, stream, on.ready - duration, on.ready, pinned});
}

void Device::host_wait(const Marker& marker) {
  streams.host_wait(marker);
  watch.retire(streams.host_clock());
  memory.reap();
  raise_pending();
}

void Device::synchronize() {
  wait_for_all();
  raise_pending();
}

void Device::wait_for_all() {
  for (StreamId id = 0; id < kStreams; ++id) streams.host_wait(streams.mark(id));
  watch.retire(streams.host_clock());
  memory.reap();
  memory.forget_previous_lives();
}

void Device::report(const Violation& violation) {
  violations.push_back(violation);
  if (settings.raise) throw ViolationError(violation);
}

void Device::raise_pending() {
  if (auto pending = std::exchange(raise_later_, std::nullopt)) throw ViolationError(*pending);
}

void Device::report_later(const Violation& violation) {
  violations.push_back(violation);
  if (settings.raise) raise_later_ = violation;
}

void Device::reset() {
  wait_for_all();
  clock.reset();
  streams.reset_times();
  counters = {};
  memory.device_usage.reset_peak();
  memory.pinned_usage.reset_peak();
  violations.clear();
  raise_later_.reset();
}

}  // namespace lowtide
