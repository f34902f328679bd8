// Every operator that has no kernel of its own here runs the CPU's, on the device's memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>

#include "allocators.h"
#include "flops.h"
#include "generator.h"
#include "launch.h"

namespace lowtide {

namespace {

using torch::jit::Stack;

bool takes_generator(const c10::Argument& argument) {
  auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool is_indexing(std::string_view op) {
  static const std::unordered_set<std::string_view> names{"aten::index",         "aten::index_put",
                                                          "aten::index_put_",    "aten::_index_put_impl_",
                                                          "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return names.count(op);
}

// Operators that read few of their first argument's elements: those that they return.
bool picks_elements(std::string_view op) {
  static const std::unordered_set<std::string_view> names{"aten::index", "aten::index_select", "aten::gather",
                                                          "aten::take", "aten::_unsafe_index"};
  return names.count(op);
}

// An argument that is written although the schema does not say so: batch norm's running statistics.
bool is_secretly_written(std::string_view op, size_t position, c10::ArrayRef<c10::IValue> arguments) {
  constexpr size_t kRunningMean = 3, kRunningVar = 4, kTraining = 5;
  return op == "aten::native_batch_norm" && (position == kRunningMean || position == kRunningVar) &&
         arguments[kTraining].toBool();
}

// A view operator returns an alias of an argument that it does not write to.
bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.alias_info() && !argument.alias_info()->isWrite();
  });
}

// Accesses name their operator for as long as the process lives; a schema may be gone with its library.
const char* interned(const std::string& name) {
  static std::mutex mutex;
  static auto* names = new std::unordered_set<std::string>();
  std::lock_guard lock(mutex);
  return names->insert(name).first->c_str();
}

// Turns the arguments of one call into what the CPU kernel wants, and its results back.
class BoxedCall {
 public:
  BoxedCall(const c10::FunctionSchema& schema, const char* name)
      : schema_(schema),
        name_(name),
        launch_(name, is_view(schema) ? Launch::Touches::nothing : Launch::Touches::memory) {}

  Stack cpu_arguments(c10::ArrayRef<c10::IValue> arguments) {
    Stack stack;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      bool written = (alias && alias->isWrite()) || is_secretly_written(name_, i, arguments);
      stack.push_back(convert(arguments[i], schema_.arguments()[i], written));
    }
    launch_.check_devices(is_indexing(name_) || std::string_view(name_).starts_with("aten::_foreach"));
    TORCH_CHECK(!is_indexing(name_) || on_sim(tensors_.at(0)), "Expected the indexed tensor to be on sim:0 like its ",
                "indices, but it is on ", tensors_.at(0).device());
    if (picks_elements(name_)) launch_.charge_less(distinct_bytes(tensors_.at(0)));
    return stack;
  }

  c10::IValue sim_result(const c10::IValue& result) {
    if (result.isTensor()) return launch_.sim(result.toTensor());
    if (!result.isTensorList()) return result;
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : result.toTensorVector()) tensors.push_back(launch_.sim(tensor));
    return tensors;
  }

  void finish(bool host_waits) { launch_.finish(matmul_flops(name_, tensors_), host_waits); }

  bool has_generator() const { return has_generator_; }

 private:
  static bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

  c10::IValue convert(const c10::IValue& value, const c10::Argument& argument, bool written) {
    if (value.isTensor()) return tensor(value.toTensor(), written);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorVector()) list.push_back(tensor(item, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
        list.push_back(item ? std::optional(tensor(*item, written)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (takes_generator(argument)) {
      has_generator_ = true;
      return cpu_generator_of(value.isNone() ? default_generator() : value.toGenerator());
    }
    return value;
  }

  at::Tensor tensor(const at::Tensor& argument, bool written) {
    tensors_.push_back(argument);
    return launch_.cpu(argument, written);
  }

  const c10::FunctionSchema& schema_;
  const char* name_;
  Launch launch_;
  std::vector<at::Tensor> tensors_;
  bool has_generator_ = false;
};

// A random operator without a generator argument draws from the CPU's default one. It is lent the state of the device's
// for the call.
class LentGenerator {
 public:
  LentGenerator() : borrower_(at::detail::getDefaultCPUGenerator()), owner_(cpu_generator_of(default_generator())) {
    saved_ = borrower_.get_state();
    borrower_.set_state(owner_.get_state());
  }
  ~LentGenerator() {
    owner_.set_state(borrower_.get_state());
    borrower_.set_state(saved_);
  }

 private:
  at::Generator borrower_, owner_;
  at::Tensor saved_;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  BoxedCall call(schema, interned(schema.name()));
  Stack arguments = call.cpu_arguments(torch::jit::last(*stack, schema.arguments().size()));
  {
    std::optional<LentGenerator> lent;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !call.has_generator()) lent.emplace();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  }
  std::vector<c10::IValue> results;
  for (const c10::IValue& result : arguments) results.push_back(call.sim_result(result));
  call.finish(op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  torch::jit::drop(*stack, schema.arguments().size());
  for (c10::IValue& result : results) torch::jit::push(*stack, std::move(result));
}

// The one of them that training uses all the time. Lending would disturb threads that draw from the CPU's meanwhile.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  Launch launch("aten::native_dropout");
  at::Tensor cpu = launch.cpu(input);
  const bool drop = train.value_or(true);
  at::Tensor mask = at::ones_like(cpu, cpu.options().dtype(at::kBool));
  if (drop) mask.bernoulli_(1 - p, cpu_generator_of(default_generator()));
  at::Tensor kept = drop ? cpu.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)) : cpu.clone();
  std::tuple<at::Tensor, at::Tensor> results{launch.sim(kept), launch.sim(mask)};
  launch.finish(/*flops=*/0);
  return results;
}

// Histograms of integers: CUDA has them, the CPU does not, and mixture-of-experts models count their tokens with them.
at::Tensor histc(const at::Tensor& input, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  Launch launch("aten::histc");
  at::Tensor cpu = launch.cpu(input);
  const bool whole = !cpu.is_floating_point();
  at::Tensor counts = at::histc(whole ? cpu.to(at::kDouble) : cpu, bins, min, max);
  at::Tensor result = launch.sim(whole ? counts.to(cpu.scalar_type()) : counts);
  launch.finish(/*flops=*/0);
  return result;
}

auto on_cpu() { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(on_cpu()); }

// Without this, a new backend gets torch's decompositions of these: many kernels where CUDA has one.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("histc", histc);
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                           "native_channel_shuffle", "addr", "addr.out", "_stack", "_stack.out"})
    m.impl(name, on_cpu());
}

}  // namespace lowtide
