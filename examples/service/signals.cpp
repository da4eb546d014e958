#include "signals.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace service {
namespace {

// A handler may do little; writing a byte into a pipe is allowed.
int pipe_ends[2] = {-1, -1};

void handle(int) {
  const int kept = errno;
  [[maybe_unused]] const auto written = write(pipe_ends[1], "", 1);
  errno = kept;
}

void set_handler(void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace

Signals::Signals() {
  if (pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) != 0) std::abort();
  set_handler(handle);
}

Signals::~Signals() { close(pipe_ends[0]); }

void Signals::wait(std::chrono::milliseconds at_most) {
  pollfd ready{pipe_ends[0], POLLIN, 0};
  while (poll(&ready, 1, at_most.count() < 0 ? -1 : static_cast<int>(at_most.count())) < 0 &&
         errno == EINTR) {
  }
  char byte;
  [[maybe_unused]] const auto taken = read(pipe_ends[0], &byte, 1);
}

void Signals::end() {
  set_handler(SIG_IGN);
  close(pipe_ends[1]);  // which the other end tells every wait
}

}  // namespace service
