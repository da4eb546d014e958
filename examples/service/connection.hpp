// Whether a client is still there.
#pragma once

#include <httplib.h>

namespace service {

// The connection that a request came on. httplib tells a handler nothing of it until it writes;
// but an answer may take minutes to be written, or have no text for many tokens, and a row is
// dear. So it is looked up among the process's own sockets, by the client's address.
class Connection {
 public:
  explicit Connection(const httplib::Request& request);

  // Whether the client has neither closed it nor vanished. True if the socket was not found.
  bool is_open() const;

 private:
  int descriptor_ = -1;
};

}  // namespace service
