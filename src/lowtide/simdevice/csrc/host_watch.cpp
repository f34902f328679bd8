#include "host_watch.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "device.h"

namespace lowtide {

namespace {

struct sigaction previous_handler;

Range whole_pages(Range range) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto begin = reinterpret_cast<uintptr_t>(range.begin) / page * page;
  auto end = (reinterpret_cast<uintptr_t>(range.end) + page - 1) / page * page;
  return {reinterpret_cast<const char*>(begin), reinterpret_cast<const char*>(end)};
}

void set_protection(Range pages, int protection) {
  int failed = mprotect(const_cast<char*>(pages.begin), pages.bytes(), protection);
  TORCH_CHECK(failed == 0, "sim: mprotect of pinned memory failed: ", std::strerror(errno));
}

// On x86-64 bit 1 of the page-fault error code tells a write from a read; elsewhere a touch counts as a read.
bool is_write(void* context) {
#if defined(__linux__) && defined(__x86_64__)
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
  (void)context;
  return false;
#endif
}

// The access was a fault of somebody else's: do what would have happened without us. If it comes back, the handler
// before us has us as the one before it (faulthandler does, when it is enabled later), and nobody handles it.
void pass_on(int number, siginfo_t* info, void* context) {
  thread_local bool passed_on = false;
  if (std::exchange(passed_on, true)) {
    signal(number, SIG_DFL);
  } else if (previous_handler.sa_flags & SA_SIGINFO) {
    previous_handler.sa_sigaction(number, info, context);
  } else if (previous_handler.sa_handler != SIG_DFL && previous_handler.sa_handler != SIG_IGN) {
    previous_handler.sa_handler(number);
  } else {
    signal(number, SIG_DFL);  // the instruction is tried again, and this time it ends the process
  }
}

// Runs on the thread that faulted, at the faulting instruction: never inside malloc or inside the device's own code.
void on_fault(int number, siginfo_t* info, void* context) {
  int saved_errno = errno;
  auto* address = static_cast<const char*>(info->si_addr);
  if (!device().watch.handle_fault(address, is_write(context))) pass_on(number, info, context);
  errno = saved_errno;
}

// Others (faulthandler) may install theirs after us, so this is looked at whenever pages are protected.
void install_handler() {
  struct sigaction present {};
  sigaction(SIGSEGV, nullptr, &present);
  if (present.sa_sigaction == on_fault) return;
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &previous_handler);
}

}  // namespace

void HostWatch::protect(const Watch& watch) {
  // A copy into the memory hides it; a copy out of it makes it read-only. Hiding wins where both share a page.
  set_protection(watch.pages, watch.pending.write ? PROT_NONE : PROT_READ);
}

void HostWatch::add(const Access& pending) {
  install_handler();
  watches_.push_back({pending, whole_pages(pending.range)});
  protect_again(pending.range);
}

void HostWatch::retire(const VectorClock& host) {
  auto done = [&](const Watch& watch) { return host.covers(watch.pending.stream, watch.pending.tick); };
  std::vector<Range> opened;
  for (const Watch& watch : watches_)
    if (done(watch)) opened.push_back(watch.pages);
  std::erase_if(watches_, done);
  reopen(opened);
}

void HostWatch::reopen(const std::vector<Range>& released) {
  for (Range pages : released) {
    open(pages);
    protect_again(pages);
  }
}

void HostWatch::forget(Range range) {
  if (!covers(range)) return;
  std::erase_if(watches_, [&](const Watch& watch) { return range.contains(watch.pending.range); });
  open(range);
}

bool HostWatch::covers(Range range) const {
  Range pages = whole_pages(range);
  return std::any_of(watches_.begin(), watches_.end(), [&](const Watch& w) { return w.pages.overlaps(pages); });
}

void HostWatch::open(Range range) { set_protection(whole_pages(range), PROT_READ | PROT_WRITE); }

void HostWatch::protect_again(Range range) {
  Range pages = whole_pages(range);
  for (bool hiding : {false, true})
    for (const Watch& watch : watches_)
      if (watch.pages.overlaps(pages) && watch.pending.write == hiding) protect(watch);
}

bool HostWatch::handle_fault(const char* address, bool write) {
  Lock lock(device().mutex);
  Range touched = whole_pages({address, address + 1});
  auto on_page = [&](const Watch& watch) { return watch.pages.overlaps(touched); };
  if (std::none_of(watches_.begin(), watches_.end(), on_page)) return false;

  // Slabs put several buffers on one page. A touch beside the pending ones breaks no rule, but the page has to be
  // opened for it, so a later touch of the pending buffer on this page goes unseen.
  auto broken = [&](const Watch& watch) {
    Range byte{address, address + 1};
    return watch.pending.range.overlaps(byte) && (watch.pending.write || write);
  };
  std::vector<Range> opened;
  for (const Watch& watch : watches_) {
    if (!broken(watch)) continue;
    device().report_later(host_access(write, watch.pending));
    opened.push_back(watch.pages);
  }
  std::erase_if(watches_, broken);
  reopen(opened);
  open(touched);
  return true;
}

}  // namespace lowtide
