// Watches the host: pinned memory that a copy still works on is taken from the host by page protection.
//
// While a D2H copy into pinned memory has not been waited for, the host may not touch those pages; while an H2D copy
// reads them, the host may not write to them. A touch faults, the handler reports it and opens the pages, and the
// program goes on with whatever bytes are there. This sees every reader (kernels, NumPy, plain pointers) and costs
// nothing per operator. A system call that is handed such memory fails with EFAULT instead.
#pragma once

#include <vector>

#include "race.h"

namespace lowtide {

class HostWatch {
 public:
  // `pending` is a copy between the device and pinned memory; its range is the pinned side.
  void add(const Access& pending);

  // Opens the pages of all copies that the host has now waited for.
  void retire(const VectorClock& host);

  // The range is about to be given back: nothing of it stays protected.
  void forget(Range range);

  // Runs `work`, which touches `range` on the device's behalf, with the pages open.
  template <typename Work>
  void open_during(Range range, Work work) {
    bool watched = covers(range);
    if (watched) open(range);
    work();
    if (watched) protect_again(range);
  }

  // A fault at `address`: reports it if the address is watched, and says whether the access can be retried.
  bool handle_fault(const char* address, bool write);

 private:
  struct Watch {
    Access pending;
    Range pages;
  };
  bool covers(Range range) const;
  void open(Range range);
  void protect(const Watch& watch);
  void protect_again(Range range);
  void reopen(const std::vector<Range>& released);

  std::vector<Watch> watches_;
};

}  // namespace lowtide
