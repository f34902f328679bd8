// Convolutions: torch asks a new backend for the "overrideable" pair.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include "flops.h"
#include "launch.h"

namespace lowtide {

namespace {

using at::IntArrayRef;
using at::Tensor;

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  Launch launch("aten::convolution");
  Tensor cpu_input = launch.cpu(input), cpu_weight = launch.cpu(weight);
  std::optional<Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = launch.cpu(*bias);
  launch.check_devices();
  Tensor output = launch.sim(at::convolution(cpu_input, cpu_weight, cpu_bias, stride, padding, dilation, transposed,
                                             output_padding, groups));
  launch.finish(convolution_flops(input, weight, output, transposed));
  return output;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  Launch launch("aten::convolution_backward");
  const int64_t out_channels = grad.size(1);
  auto [grad_input, grad_weight, grad_bias] =
      at::convolution_backward(launch.cpu(grad), launch.cpu(input), launch.cpu(weight), out_channels, stride, padding,
                               dilation, transposed, output_padding, groups, wanted);
  std::tuple<Tensor, Tensor, Tensor> result{launch.sim(grad_input), launch.sim(grad_weight), launch.sim(grad_bias)};
  launch.finish((wanted[0] + wanted[1]) * convolution_flops(input, weight, grad, transposed));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace lowtide
