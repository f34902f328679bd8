// The C++ side of lowtide.errors.DeviceViolationError: torch's bindings turn it into the Python exception.
#pragma once

#include <torch/csrc/Exceptions.h>

#include "race.h"

namespace lowtide {

class ViolationError : public torch::PyTorchError {
 public:
  explicit ViolationError(const Violation& violation) : PyTorchError(violation.kind + ": " + violation.message) {}

  PyObject* python_type() override { return type; }

  static PyObject* type;  // set once by the Python package
};

}  // namespace lowtide
