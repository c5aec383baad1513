// A host call that holds its device for a given time: it sleeps under the device's lock, so that any number of emulated
// devices run truly side by side on a machine with few cores, and two holds of one device never do.

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kDevices = 64;  // of one process
constexpr int64_t kSecond = 1000000000;

std::mutex locks[kDevices];
std::atomic<int64_t> counts[kDevices];
std::atomic<int64_t> held[kDevices];  // nanoseconds asked for

void Sleep(int64_t nanoseconds) {
  // Wake when asked to: Linux otherwise adds up to 50 us to every sleep.
  thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  static_cast<void>(slack);
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t total = until.tv_nsec + nanoseconds;
  until.tv_sec += total / kSecond;
  until.tv_nsec = total % kSecond;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

ffi::Error HoldImpl(int32_t ordinal, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out, int64_t nanoseconds) {
  const int device = ordinal % kDevices;  // the number in its process: the process's own number is in the high bits
  {
    const std::lock_guard<std::mutex> lock(locks[device]);
    if (nanoseconds > 0) Sleep(nanoseconds);
  }
  counts[device] += 1;
  held[device] += nanoseconds;
  std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Hold, HoldImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("nanoseconds"));

extern "C" int64_t hold_count(int device) { return counts[device]; }
extern "C" int64_t hold_nanoseconds(int device) { return held[device]; }
