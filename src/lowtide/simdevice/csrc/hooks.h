#pragma once

namespace lowtide {

// Makes `sim` the process's accelerator.
void register_hooks();

}  // namespace lowtide
