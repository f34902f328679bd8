// The race detector: every access to a block of memory must be ordered after the accesses that it conflicts with.
//
// Each block keeps the accesses that still matter, as byte ranges, so that two halves of one buffer may be used on two
// streams. Order is judged with vector clocks and therefore does not depend on when a copy happened to run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "vector_clock.h"

namespace lowtide {

struct Range {
  const char* begin = nullptr;
  const char* end = nullptr;

  size_t bytes() const { return end - begin; }
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Access {
  Range range;
  StreamId stream = kDefaultStream;
  uint64_t tick = 0;
  bool write = false;
  const char* op = "";         // names of operators live as long as the process
  uint64_t queued = 0;         // its place in the stream's queue, if it did not run at once
  bool previous_life = false;  // made before the allocator handed the memory out again
};

struct Violation {
  std::string kind;  // read-race, write-race, use-after-free, host-read, host-write
  std::string op;
  StreamId stream;  // -1: the host
  std::string other_op;
  StreamId other_stream;
  size_t bytes;
  std::string message;
};

class AccessHistory {
 public:
  // Records an access that is ordered after `now`, and returns an earlier one that it races with.
  // What the host has waited for can race with nothing any more, and is forgotten.
  std::optional<Access> record(const Access& access, const VectorClock& now, const VectorClock& host);

  // An access that `now` is not ordered after, or nothing.
  const Access* first_unordered(const VectorClock& now) const;

  void forget(StreamId stream);

  // The memory is handed out again, as `whole`: its new owner must be ordered after this access of an earlier one.
  void inherit(Access access, Range whole);

  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  std::vector<Access> accesses_;
};

Violation race(const Access& access, const Access& conflict);
Violation use_after_free(const Access& user, StreamId owner, size_t bytes);
Violation host_access(bool write, const Access& pending);

}  // namespace lowtide
