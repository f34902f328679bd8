#include "allocators.h"

#include <cstring>

#include "device.h"

namespace lowtide {

namespace {

void free_block(void* pointer) {
  if (!pointer) return;
  Lock lock(device().mutex);
  device().memory.free(pointer);
}

c10::DataPtr owned(char* data, c10::Device where) { return {data, data, &free_block, where}; }

class DeviceMemoryAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(device().mutex);
    return owned(bytes ? device().memory.allocate_device(bytes) : nullptr, kSimDevice);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(device().mutex);
    device().memory.record_stream(pointer.get(), stream.id());
  }

  // Nothing is cached and nothing fragments here, so "reserved" is what is live.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(device().mutex);
    device().memory.reap();
    const Usage& usage = device().memory.device_usage;
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& total = (*bytes)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      total.current = static_cast<int64_t>(usage.live);
      total.peak = static_cast<int64_t>(usage.peak);
    }
    stats.num_ooms = static_cast<int64_t>(device().counters.ooms);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(device().mutex);
    device().memory.device_usage.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(device().mutex);
    device().memory.reap();
    size_t capacity = device().settings.memory, live = device().memory.device_usage.live;
    return {capacity - std::min(capacity, live), capacity};
  }
};

class PinnedMemoryAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(device().mutex);
    return owned(bytes ? device().memory.allocate_pinned(bytes) : nullptr, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  // Freed blocks wait for their copies by themselves (Memory::free_pinned), and nothing is cached.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    Lock lock(device().mutex);
    device().memory.reap();
    const Usage& usage = device().memory.pinned_usage;
    at::HostStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) {
      bytes->current = static_cast<int64_t>(usage.live);
      bytes->peak = static_cast<int64_t>(usage.peak);
    }
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    Lock lock(device().mutex);
    device().memory.pinned_usage.reset_peak();
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceMemoryAllocator();
  return *allocator;
}

at::HostAllocator& pinned_allocator() {
  static auto* allocator = new PinnedMemoryAllocator();
  return *allocator;
}

c10::DataPtr adopt_storage(const c10::Storage& cpu) {
  if (cpu.nbytes() == 0) return owned(nullptr, kSimDevice);
  std::shared_ptr<char> backing(static_cast<char*>(cpu.mutable_data()), [cpu](char*) {});
  Lock lock(device().mutex);
  return owned(device().memory.adopt(std::move(backing), cpu.nbytes()), kSimDevice);
}

}  // namespace lowtide
