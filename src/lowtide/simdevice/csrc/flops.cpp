#include "flops.h"

namespace lowtide {

namespace {

// [..., m, k] times [..., k, n]
double product(const at::Tensor& a, const at::Tensor& b) {
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

}  // namespace

double matmul_flops(std::string_view op, const std::vector<at::Tensor>& tensors) {
  if (op == "aten::mm" || op == "aten::bmm") return product(tensors[0], tensors[1]);
  if (op == "aten::addmm" || op == "aten::baddbmm" || op == "aten::_addmm_activation")
    return product(tensors[1], tensors[2]);
  return 0;
}

double convolution_flops(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output, bool transposed) {
  // Each output element (each input element, if transposed) takes one multiply-add per weight of its channel.
  const at::Tensor& driven = transposed ? input : output;
  double per_channel = static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0));
  return 2.0 * static_cast<double>(driven.numel()) * per_channel;
}

double attention_flops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  double scores = static_cast<double>(query.size(0) * query.size(1) * query.size(2)) * static_cast<double>(key.size(2));
  return 2.0 * scores * static_cast<double>(query.size(3) + value.size(3));
}

double attention_backward_flops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  // Five products: the scores again, and the gradients of probabilities, value, query and key.
  double scores = static_cast<double>(query.size(0) * query.size(1) * query.size(2)) * static_cast<double>(key.size(2));
  return 2.0 * scores * static_cast<double>(3 * query.size(3) + 2 * value.size(3));
}

}  // namespace lowtide
