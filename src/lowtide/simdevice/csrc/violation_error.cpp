#include "violation_error.h"

namespace lowtide {

PyObject* ViolationError::type = nullptr;

}  // namespace lowtide
