// Scaled dot product attention with the memory of a flash kernel: the scores are never whole in device memory.
//
// Dropout, and masks that need a gradient or broadcast over queries or keys, take torch's math path instead.
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "flops.h"
#include "launch.h"

namespace lowtide {

namespace {

using at::Tensor;

bool fits_flash(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask) {
  bool shapes = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.numel() && key.numel() &&
                query.size(0) == key.size(0) && query.size(3) == key.size(3) && key.size(3) == value.size(3) &&
                key.size(1) == value.size(1) && query.size(1) % key.size(1) == 0;
  bool packed = query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  if (!shapes || !packed || !query.is_floating_point()) return false;
  if (!mask || !mask->defined()) return true;
  return !mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4) && mask->size(-2) == query.size(2) &&
         mask->size(-1) == key.size(2);
}

int64_t choose_backend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                       double dropout, bool, std::optional<double>, bool grouped_query) {
  bool flash = at::globalContext().userEnabledFlashSDP() && dropout == 0.0 && fits_flash(query, key, value, mask) &&
               (grouped_query || query.size(1) == key.size(1));
  return static_cast<int64_t>(flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

// Grouped-query attention: the CPU kernel wants as many key heads as query heads.
Tensor repeat_heads(const Tensor& tensor, int64_t groups) {
  return groups == 1 ? tensor : tensor.repeat_interleave(groups, /*dim=*/1);
}

Tensor sum_groups(const Tensor& grad, int64_t groups) {
  return groups == 1 ? grad : grad.unflatten(1, {grad.size(1) / groups, groups}).sum(2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, bool, std::optional<double> scale) {
  Launch launch("aten::_scaled_dot_product_flash_attention");
  const int64_t groups = query.size(1) / key.size(1);
  std::optional<Tensor> cpu_mask;
  if (mask && mask->defined()) cpu_mask = launch.cpu(*mask);
  Tensor cpu_query = launch.cpu(query), cpu_key = launch.cpu(key), cpu_value = launch.cpu(value);
  launch.check_devices();
  auto [cpu_output, cpu_logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      cpu_query, repeat_heads(cpu_key, groups), repeat_heads(cpu_value, groups), dropout, causal, cpu_mask, scale);
  Tensor output = launch.sim(cpu_output), logsumexp = launch.sim(cpu_logsumexp);
  Tensor unused = at::empty({0}, query.options().dtype(at::kLong));  // what only other backends need
  launch.finish(attention_flops(query, key, value));
  return {output, logsumexp, unused, unused, query.size(2), key.size(2), unused, unused, unused};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  Launch launch("aten::_scaled_dot_product_flash_attention_backward");
  const int64_t groups = query.size(1) / key.size(1);
  std::optional<Tensor> cpu_mask;
  if (mask.defined()) cpu_mask = launch.cpu(mask);
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      launch.cpu(grad), launch.cpu(query), repeat_heads(launch.cpu(key), groups),
      repeat_heads(launch.cpu(value), groups), launch.cpu(output), launch.cpu(logsumexp), dropout, causal, cpu_mask,
      scale);
  std::tuple<Tensor, Tensor, Tensor, Tensor> grads{launch.sim(grad_query), launch.sim(sum_groups(grad_key, groups)),
                                                   launch.sim(sum_groups(grad_value, groups)), Tensor()};
  launch.finish(attention_backward_flops(query, key, value));
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

}  // namespace lowtide

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lowtide::choose_backend)
}
