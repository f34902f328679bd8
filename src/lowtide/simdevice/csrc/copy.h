#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide {

// `Tensor.copy_` with the device on either side, or on both.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to);

// `.item()`: the host waits for one element.
at::Scalar local_scalar_dense(const at::Tensor& tensor);

void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace lowtide
