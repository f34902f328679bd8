// Memory as torch sees it: the allocators behind `device="sim"` and `pin_memory=True`.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

namespace lowtide {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
inline const c10::Device kSimDevice{kSim, 0};

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

// Hands a CPU storage over to the device, without a copy.
c10::DataPtr adopt_storage(const c10::Storage& cpu);

}  // namespace lowtide
