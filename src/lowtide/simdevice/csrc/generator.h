// The device's own random numbers: a generator whose state is kept apart from the CPU's.
#pragma once

#include <ATen/core/Generator.h>

namespace lowtide {

const at::Generator& default_generator();
at::Generator new_generator();

// The CPU generator inside one of ours, for kernels that run on the CPU.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace lowtide
