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
    size_t capacity = device().settings.memory, live = device().memory.device_usage.live;
    return {capacity - std::min(capacity, live), capacity};
  }
};

class PinnedMemoryAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(device().mutex);
    return owned(bytes ? device().memory.allocate_pinned(bytes) : nullptr, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceMemoryAllocator();
  return *allocator;
}

c10::Allocator& pinned_allocator() {
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
