// What torch's context asks of an accelerator: is it there, its pinned memory, its generators.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocators.h"
#include "device.h"
#include "generator.h"
#include "copy.h"

namespace lowtide {

namespace {

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(device().mutex);
    const Block* block = device().memory.find(data);
    return block && block->kind == Kind::pinned;
  }
  at::Device getDeviceFromPtr(void*) const override { return kSimDevice; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new SimHooks()); }

}  // namespace lowtide
