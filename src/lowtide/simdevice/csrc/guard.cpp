// Streams, events and the one device index, as torch's generic APIs (torch.Stream, torch.Event, torch.accelerator)
// ask for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocators.h"
#include "device.h"

namespace lowtide {

namespace {

// What one look at an event or a stream costs the host: polling loops make progress in virtual time.
constexpr double kQuerySeconds = 1e-6;

void check_index(c10::Device wanted) {
  TORCH_CHECK(wanted.index() <= 0, "sim: there is one device per process, so sim:", int(wanted.index()),
              " does not exist; use sim or sim:0");
}

c10::Stream as_stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kSimDevice, id); }

Marker* as_event(void* event) { return static_cast<Marker*>(event); }

bool query(const Marker& marker) {
  device().clock.host_spends(kQuerySeconds);
  if (!device().streams.reached(marker)) return false;
  device().host_wait(marker);
  return true;
}

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kSimDevice; }
  c10::Device exchangeDevice(c10::Device wanted) const override {
    check_index(wanted);
    return kSimDevice;
  }
  void setDevice(c10::Device wanted) const override { check_index(wanted); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return as_stream(Streams::current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(kDefaultStream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return new_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return new_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(Streams::exchange_current(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(device().mutex);
    return query(device().streams.mark(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(device().mutex);
    device().host_wait(device().streams.mark(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock lock(device().mutex);
    device().synchronize();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(device().mutex);
    if (!*event) *event = new Marker();
    *as_event(*event) = device().streams.mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock(device().mutex);
    device().streams.wait(stream.id(), *as_event(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock(device().mutex);
    return query(*as_event(event));
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(device().mutex);
    device().host_wait(*as_event(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete as_event(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "sim: both events must be recorded before elapsed_time");
    Lock lock(device().mutex);
    constexpr double kMilliseconds = 1e3;
    return (device().streams.time_of(*as_event(end)) - device().streams.time_of(*as_event(start))) * kMilliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

 private:
  static c10::Stream new_stream() {
    Lock lock(device().mutex);
    return as_stream(device().streams.next_from_pool());
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

}  // namespace lowtide
