// Vector clocks: who knows about whose work.
//
// Every stream counts the operations submitted to it ("ticks"). A vector clock holds, for each stream, the newest
// tick that its owner is ordered after. Operation A happens before operation B exactly if B's clock covers A's tick.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace lowtide {

using StreamId = int64_t;

// Stream 0 is the default stream. As on CUDA, all other streams come from a pool of 32 and are handed out in turn,
// so clocks have a fixed size however many streams a program asks for.
constexpr StreamId kDefaultStream = 0;
constexpr StreamId kPoolStreams = 32;
constexpr StreamId kStreams = kPoolStreams + 1;

class VectorClock {
 public:
  uint64_t advance(StreamId stream) { return ++ticks_[stream]; }

  bool covers(StreamId stream, uint64_t tick) const { return ticks_[stream] >= tick; }

  void join(const VectorClock& other) {
    for (StreamId s = 0; s < kStreams; ++s) ticks_[s] = std::max(ticks_[s], other.ticks_[s]);
  }

 private:
  std::array<uint64_t, kStreams> ticks_{};
};

}  // namespace lowtide
