#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include "allocators.h"

namespace lowtide {

namespace {

// Kernels run on the CPU and want its Mersenne twister, so each generator wraps one of its own.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(at::Generator cpu)
      : GeneratorImpl(kSimDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator cpu() const { return cpu_; }

 private:
  SimGenerator* clone_impl() const override { return new SimGenerator(cpu_.clone()); }

  at::Generator cpu_;
};

}  // namespace

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator new_generator() {
  return at::make_generator<SimGenerator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' generator but found one for '",
              generator.device(), "'");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace lowtide
