#include "race.h"

#include <algorithm>
#include <sstream>

namespace lowtide {

namespace {

bool ordered(const Access& earlier, const VectorClock& now) { return now.covers(earlier.stream, earlier.tick); }

// `access` takes the place of an older one that it covers: whoever is ordered after it is ordered after both.
bool supersedes(const Access& access, const Access& older, const VectorClock& now) {
  if (!access.range.contains(older.range) || !ordered(older, now)) return false;
  return access.write || (!older.write && older.stream == access.stream);
}

std::string on_stream(StreamId stream) { return "stream " + std::to_string(stream); }

}  // namespace

std::optional<Access> AccessHistory::record(const Access& access, const VectorClock& now, const VectorClock& host) {
  auto races = [&](const Access& earlier) {
    return (access.write || earlier.write) && access.range.overlaps(earlier.range) && !ordered(earlier, now);
  };
  auto found = std::find_if(accesses_.begin(), accesses_.end(), races);
  std::optional<Access> conflict;
  if (found != accesses_.end()) conflict = *found;
  std::erase_if(accesses_, [&](const Access& older) { return ordered(older, host) || supersedes(access, older, now); });
  accesses_.push_back(access);
  return conflict;
}

const Access* AccessHistory::first_unordered(const VectorClock& now) const {
  for (const Access& access : accesses_)
    if (!ordered(access, now)) return &access;
  return nullptr;
}

void AccessHistory::forget(StreamId stream) {
  std::erase_if(accesses_, [&](const Access& access) { return access.stream == stream; });
}

void AccessHistory::inherit(Access access, Range whole) {
  access.range = whole;
  access.write = true;  // to a new owner, even a late read of the old one is a conflict
  access.previous_life = true;
  accesses_.push_back(access);
}

Violation race(const Access& access, const Access& conflict) {
  std::ostringstream text;
  text << access.op << " on " << on_stream(access.stream) << (access.write ? " overwrites " : " reads ")
       << access.range.bytes() << " bytes that ";
  if (conflict.previous_life) {
    text << "were freed and handed out again while " << conflict.op << " on " << on_stream(conflict.stream)
         << " may still use them";
  } else {
    text << conflict.op << " on " << on_stream(conflict.stream) << (conflict.write ? " writes" : " still reads");
  }
  text << "; nothing makes " << on_stream(access.stream) << " wait for " << on_stream(conflict.stream);
  const char* kind = conflict.previous_life ? "use-after-free" : access.write ? "write-race" : "read-race";
  return {kind, access.op, access.stream, conflict.op, conflict.stream, access.range.bytes(), text.str()};
}

Violation use_after_free(const Access& user, StreamId owner, size_t bytes) {
  std::ostringstream text;
  text << "block of " << bytes << " bytes of " << on_stream(owner) << " freed while " << user.op << " on "
       << on_stream(user.stream) << " may still use it; keep a reference until " << on_stream(owner)
       << " waits for it, or call record_stream";
  return {"use-after-free", "free", owner, user.op, user.stream, bytes, text.str()};
}

Violation host_access(bool write, const Access& pending) {
  std::ostringstream text;
  text << "the host " << (write ? "writes" : "reads") << " pinned memory while " << pending.op << " of "
       << pending.range.bytes() << " bytes on " << on_stream(pending.stream) << " has not been waited for";
  return {write ? "host-write" : "host-read", write ? "host write" : "host read", -1, pending.op,
          pending.stream,                     pending.range.bytes(),              text.str()};
}

}  // namespace lowtide
