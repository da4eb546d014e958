// SIGTERM and SIGINT as something to wait for.
#pragma once

#include <chrono>

namespace service {

// From here on the two signals do not end the process. One object in a process.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Wait for the next signal, for so long at the most; negative: without end.
  void wait(std::chrono::milliseconds at_most = std::chrono::milliseconds(-1));

  // From here on no wait waits, and signals are passed over. To be called once.
  void end();
};

}  // namespace service
