#include "clock.h"

#include <algorithm>

namespace lowtide {

double Engine::reserve(double ready, double duration) {
  busy_ += duration;
  double start = ready;
  auto next = slots_.begin();
  for (; next != slots_.end() && start + duration > next->first; ++next) start = std::max(start, next->second);
  double end = start + duration;

  if (next != slots_.begin() && std::prev(next)->second == start) {
    start = std::prev(next)->first;
    slots_.erase(std::prev(next));
  }
  double merged_end = end;
  if (next != slots_.end() && next->first == end) {
    merged_end = next->second;
    slots_.erase(next);
  }
  slots_[start] = merged_end;
  return end;
}

void Engine::forget_before(double now) {
  while (!slots_.empty() && slots_.begin()->second <= now) slots_.erase(slots_.begin());
}

void Engine::reset() {
  slots_.clear();
  busy_ = 0;
}

void Clock::host_waits_until(double time) {
  host = std::max(host, time);
  for (Engine* engine : {&compute, &h2d, &d2h}) engine->forget_before(host);
}

void Clock::reset() {
  for (Engine* engine : {&compute, &h2d, &d2h}) engine->reset();
  host = 0;
  ++epoch;
}

}  // namespace lowtide
