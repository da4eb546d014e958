#include "connection.hpp"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace service {
namespace {

bool is_peer(int descriptor, const std::string& address, const std::string& port) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
  char host[NI_MAXHOST], service[NI_MAXSERV];
  return getnameinfo(reinterpret_cast<sockaddr*>(&peer), length, host, sizeof(host), service,
                     sizeof(service), NI_NUMERICHOST | NI_NUMERICSERV) == 0 &&
         address == host && port == service;
}

}  // namespace

Connection::Connection(const httplib::Request& request) {
  const std::string port = std::to_string(request.remote_port);
  std::error_code none;  // without /proc none is found
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const int descriptor = std::atoi(entry.path().filename().c_str());
    if (is_peer(descriptor, request.remote_addr, port)) {
      descriptor_ = descriptor;
      return;
    }
  }
}

bool Connection::is_open() const {
  pollfd state{descriptor_, POLLRDHUP, 0};  // poll passes over a negative descriptor
  return poll(&state, 1, 0) <= 0 || (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0;
}

}  // namespace service
