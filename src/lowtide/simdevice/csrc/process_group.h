#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lowtide {

// Collectives for device tensors, staged through the host and carried by `host_backend` (gloo).
c10::intrusive_ptr<c10d::Backend> stage_through_host(c10::intrusive_ptr<c10d::Backend> host_backend);

}  // namespace lowtide
