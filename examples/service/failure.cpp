#include "failure.hpp"

namespace service {

Failure invalid(const std::string& param, const std::string& message) {
  return {400, message, "invalid_request_error", param, "invalid_value"};
}

Failure failure_of(const export_grok::Error& error) {
  using export_grok::Code;
  switch (error.code) {
    case Code::argument:
    case Code::request:
      return invalid("", error.text);
    case Code::busy:
      return {429, error.text, "rate_limit_error", "", "rate_limit_exceeded"};
    case Code::closed:
    case Code::memory:
      return {503, error.text, "server_error", "", "unavailable"};
    default:
      return {500, error.text, "server_error", "", "engine_error"};
  }
}

}  // namespace service
