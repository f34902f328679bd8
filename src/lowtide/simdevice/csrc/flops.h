// How much arithmetic a kernel does. Only what dominates a training step counts: matrix products, convolutions and
// attention, with the formulas of torch.utils.flop_counter. All else is limited by memory bandwidth.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace lowtide {

// `tensors` are the operator's tensor arguments in the order of its schema.
double matmul_flops(std::string_view op, const std::vector<at::Tensor>& tensors);

double convolution_flops(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output, bool transposed);

double attention_flops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);
double attention_backward_flops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

}  // namespace lowtide
