#include "device.h"

#include <algorithm>
#include <utility>

#include "violation_error.h"

namespace lowtide {

Device& device() {
  static auto* instance = new Device();
  return *instance;
}

uint64_t Device::begin(StreamId stream) {
  if (std::exchange(raise_later_, false)) throw ViolationError(violations.back());
  return streams.begin(stream);
}

void Device::access(const Access& access) {
  Block* block = memory.find(access.range.begin);
  if (!block) return;
  auto conflict = block->history.record(access, streams[access.stream].clock);
  if (conflict) report(race(access, *conflict));
}

double Device::charge_kernel(StreamId stream, double flops, double bytes) {
  ++counters.kernels;
  counters.flops += flops;
  Stream& on = streams[stream];
  double duration = std::max(flops / settings.flops, bytes / settings.bandwidth);
  on.ready = clock.compute.reserve(std::max(on.ready, clock.host), duration);
  clock.host_spends(settings.launch);
  return on.ready;
}

double Device::charge_copy(StreamId stream, Direction direction, size_t bytes) {
  ++counters.copies;
  bool h2d = direction == Direction::h2d;
  (h2d ? counters.h2d_bytes : counters.d2h_bytes) += bytes;
  Stream& on = streams[stream];
  double duration = static_cast<double>(bytes) / (h2d ? settings.h2d : settings.d2h);
  on.ready = (h2d ? clock.h2d : clock.d2h).reserve(std::max(on.ready, clock.host), duration);
  clock.host_spends(settings.launch);
  return on.ready;
}

void Device::host_wait(const Marker& marker) {
  streams.host_wait(marker);
  watch.retire(streams.host_clock());
  memory.reap();
}

void Device::synchronize() {
  for (StreamId id = 0; id < kStreams; ++id) streams.host_wait(streams.mark(id));
  watch.retire(streams.host_clock());
  memory.reap();
  memory.forget_previous_lives();
}

void Device::report(const Violation& violation) {
  violations.push_back(violation);
  if (settings.raise) throw ViolationError(violation);
}

void Device::report_later(const Violation& violation) {
  violations.push_back(violation);
  raise_later_ = settings.raise;
}

void Device::reset() {
  synchronize();
  clock.reset();
  streams.reset_times();
  counters = {};
  memory.device_usage.reset_peak();
  memory.pinned_usage.reset_peak();
  violations.clear();
  raise_later_ = false;
}

}  // namespace lowtide
